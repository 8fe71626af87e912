"""`quartet generate`: streams one answer to standard output."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from quartet.services.cli.answer import (
    Stats,
    build_parser,
    print_answer,
    read_prompt,
    run_with_client,
    sampling_of,
)

DESCRIPTION = """Streams one answer of a running server to standard output. The prompt is a user's message, put
through the model's chat template, unless --raw is given."""
EPILOG = """examples:
  quartet generate 'Why is the sky blue?'
  quartet generate --raw --temperature 0 --max-tokens 20 'The capital of France is'
  git diff | quartet generate --system 'Write a commit message for this diff.' -
"""


def main(argv: Sequence[str]) -> int:
    parser = build_parser("generate", DESCRIPTION, EPILOG)
    parser.add_argument("prompt", nargs="+", metavar="PROMPT", help="the prompt; - reads standard input")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without a chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message before the prompt")
    parser.add_argument("--stats", action="store_true", help="print speed to stderr at the end")
    options = parser.parse_args(argv)
    if options.raw and options.system is not None:
        parser.error("--system needs a chat template: leave --raw out")
    text = read_prompt(options.prompt)
    stats = Stats() if options.stats else None

    def body(client: Any) -> int:
        system = [{"role": "system", "content": options.system}] if options.system is not None else []
        prompt = {"prompt": text} if options.raw else {"messages": [*system, {"role": "user", "content": text}]}
        print_answer(client, sampling_of(options), stats, **prompt)
        if stats:
            print(f"[{stats}]", file=sys.stderr)
        return 0

    return run_with_client("generate", options, body)
