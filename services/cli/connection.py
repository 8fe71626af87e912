"""The flags that tell which server to talk to, and how."""

from __future__ import annotations

import argparse
import os
from typing import Any

from quartet.shared.address import DEFAULT_ADDRESS

TLS = (
    ("--tls-ca", "who has signed the server's certificate (default with TLS: the usual authorities"),
    ("--tls-cert", "this client's certificate, where the server wants one (default: none"),
    ("--tls-key", "its private key (default: none"),
)


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        default=os.environ.get("QUARTET_ADDRESS") or DEFAULT_ADDRESS,
        help="the server's gRPC address; grpcs://HOST:PORT is with TLS (default: %(default)s; env: QUARTET_ADDRESS)",
    )
    for flag, text in TLS:
        env = "QUARTET_" + flag.strip("-").replace("-", "_").upper()
        parser.add_argument(
            flag, default=os.environ.get(env, ""), metavar="FILE", help=f"PEM file: {text}; env: {env})"
        )


def connection_of(options: argparse.Namespace) -> dict[str, Any]:
    """The client's arguments."""
    names = ("address", "tls_ca", "tls_cert", "tls_key")
    return {name: getattr(options, name) for name in names}
