"""`quartet keys`: makes the keys of tcp links between hosts, and those of the API."""

from __future__ import annotations

import argparse
import hashlib
import re
import secrets
import sys
from collections.abc import Sequence

from quartet.shared import curve

DESCRIPTION = """Makes CURVE keys for tcp:// links (generate): with the setting curve_keys, only who has them can
connect. Makes keys for the gateway's API (api): with the setting api_key_hashes, only who has one is let in."""
EPILOG = """Each service takes the folder as its setting curve_keys. Give each host only what it needs:
  gateway, scheduler     server.key_secret  client.key
  tokenizer, executor    client.key_secret  server.key
Further public keys named client*.key in the folder are let in too, so hosts can have keys of their own.

example:
  quartet keys generate keys
  quartet scheduler --curve-keys keys --executor-link tcp://0.0.0.0:7003
  quartet executor --curve-keys keys --scheduler-link tcp://10.0.0.5:7003

An API key is printed once and stored nowhere; the gateway is given its hash:
  quartet keys api alice
  quartet gateway --api-key-hashes alice=…       or a line in the file that --api-key-file names
"""
API_PREFIX = "qk-"


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
    generate.add_argument(
        "--split",
        action="store_true",
        help="in two folders: DIR/binder for gateway and scheduler, DIR/dialer for the rest",
    )
    generate.add_argument("--if-missing", action="store_true", help="do nothing when a whole key set is there")
    api = commands.add_parser("api", help="make a key for the gateway's API and print it with its hash")
    api.add_argument("name", nargs="?", default="", metavar="NAME", help="whose it is, for accounting and logs")
    options = parser.parse_args(argv)
    if not hasattr(options, "folder"):
        return _make_api_key(options.name)
    try:
        if options.if_missing and curve.has_keys(options.folder, split=options.split):
            return 0
        written = curve.generate(options.folder, split=options.split)
    except curve.KeysError as error:
        print(f"quartet keys: {error}", file=sys.stderr)
        return 1
    print(*written, sep="\n")
    return 0


def _make_api_key(name: str) -> int:
    if not re.fullmatch(r"[A-Za-z0-9_.@-]{0,64}", name):
        print(f"quartet keys: a name has letters, digits and _.@- only, got {name!r}", file=sys.stderr)
        return 2
    key = API_PREFIX + secrets.token_urlsafe(32)
    digest = hashlib.sha256(key.encode()).hexdigest()
    print(f"key   {key}")
    print(f"hash  {name}={digest}" if name else f"hash  {digest}")
    return 0
