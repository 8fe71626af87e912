"""`python -m quartet.services.tokenizer`: runs the tokenizer."""

from __future__ import annotations

import os

# Each prompt is encoded in one of our own threads; a pool inside the library would only fight with them.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import asyncio
import sys

import uvloop

from quartet.services.tokenizer.chat_template import read_template
from quartet.services.tokenizer.loaded import TokenizerError
from quartet.services.tokenizer.process import run
from quartet.services.tokenizer.settings import TokenizerSettings
from quartet.shared.config import EXIT_SETTINGS_ERROR, SettingsError, load_settings
from quartet.shared.log import configure_logging
from quartet.shared.model_files import ModelError
from quartet.shared.transport import flush


def main(argv: list[str] | None = None) -> int:
    settings = load_settings(
        TokenizerSettings,
        section="tokenizer",
        argv=sys.argv[1:] if argv is None else argv,
        description="Turns prompts into token ids and output ids into text, between gateways and the scheduler.",
    )
    configure_logging("tokenizer", settings.log_level, settings.log_format, settings.name)
    try:
        template = read_template(settings.chat_template)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                return runner.run(run(settings, template))
            finally:
                flush()
    except (ModelError, TokenizerError) as error:
        print(f"quartet tokenizer: {error}", file=sys.stderr)
        return 1
    except SettingsError as error:  # one that takes more than its own text to check
        print(f"quartet tokenizer: {error}", file=sys.stderr)
        return EXIT_SETTINGS_ERROR


if __name__ == "__main__":
    raise SystemExit(main())
