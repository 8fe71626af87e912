"""`quartet keys`: makes the keys of tcp links between hosts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from quartet.shared import curve

DESCRIPTION = "Makes CURVE keys for tcp:// links: with the setting curve_keys, only who has them can connect."
EPILOG = """Each service takes the folder as its setting curve_keys. Give each host only what it needs:
  gateway, scheduler     server.key_secret  client.key
  tokenizer, executor    client.key_secret  server.key
Further public keys named client*.key in the folder are let in too, so hosts can have keys of their own.

example:
  quartet keys generate keys
  quartet scheduler --curve-keys keys --executor-link tcp://0.0.0.0:7003
  quartet executor --curve-keys keys --scheduler-link tcp://10.0.0.5:7003
"""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "quartet keys",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    generate = commands.add_parser("generate", help="make a new key set in a folder")
    generate.add_argument(
        "folder", metavar="DIR", help="is made when it is not there; keys in it are never overwritten"
    )
    options = parser.parse_args(argv)
    try:
        written = curve.generate(options.folder)
    except curve.KeysError as error:
        print(f"quartet keys: {error}", file=sys.stderr)
        return 1
    print(*written, sep="\n")
    return 0
