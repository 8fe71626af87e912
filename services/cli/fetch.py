"""`quartet fetch`: puts a model's files on this machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from quartet.shared.config import DEFAULT_MODEL
from quartet.shared.log import configure_logging
from quartet.shared.model_files import ALIASES, ModelError, TerminalProgress, resolve_model

DESCRIPTION = "Downloads a model into the cache, unless it is there, and prints where it is."
EPILOG = f"""MODEL is one of: {", ".join(ALIASES)} (an alias), a hub id (owner/name[@revision]),
a .gguf file or a folder. The cache is $QUARTET_CACHE_DIR, else ~/.cache/quartet;
hub ids use Hugging Face's own cache.

examples:
  quartet fetch
  quartet fetch Qwen/Qwen3-0.6B
"""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "quartet fetch",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = os.environ.get("QUARTET_MODEL") or DEFAULT_MODEL
    parser.add_argument("model", metavar="MODEL", nargs="?", default=default, help=f"default: {default}")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    options = parser.parse_args(argv)
    configure_logging("fetch", log_format="console", level="error" if options.quiet else "info")
    try:
        files = resolve_model(options.model, (lambda *_: None) if options.quiet else TerminalProgress())
    except ModelError as error:
        print(f"quartet fetch: {error}", file=sys.stderr)
        return 1
    if not options.quiet:
        print(files.path)
    return 0
