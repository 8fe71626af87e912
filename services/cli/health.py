"""`quartet health`: is a service ready? Made for container health checks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from quartet.services.cli.connection import add_connection_flags, connection_of
from quartet.shared.config import default_run_dir
from quartet.shared.liveness import check, status_path

DESCRIPTION = """Exits with 0 when the service is ready, with 1 and one line that says why when it is not.

Without an argument it asks the gateway over gRPC (grpc.health.v1), whose readiness stands for the
whole line: it fails while no executor makes progress. With a service's name it reads the status
file that the service rewrites with each heartbeat in its run_dir; a frozen process leaves it stale.
A gateway with API keys wants one in QUARTET_API_KEY, or to be asked by its name."""
EPILOG = """examples:
  quartet health
  quartet health --address gateway:50051
  quartet health executor --run-dir /run/quartet
"""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "quartet health",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("service", nargs="?", choices=["gateway", "tokenizer", "scheduler", "executor"])
    add_connection_flags(parser)
    parser.add_argument(
        "--run-dir",
        default=os.environ.get("QUARTET_RUN_DIR") or default_run_dir(),
        help="where status files are (default: %(default)s; env: QUARTET_RUN_DIR)",
    )
    parser.add_argument("--timeout", type=float, default=3.0, help="seconds to wait for an answer (default: 3)")
    options = parser.parse_args(argv)
    if options.service:
        problem = check(status_path(options.run_dir, options.service))
    else:
        problem = _ask_gateway(connection_of(options), options.timeout)
    if problem:
        print(f"quartet health: {problem}", file=sys.stderr)
    return 1 if problem else 0


def _ask_gateway(connection: dict[str, str], timeout: float) -> str | None:
    address = connection["address"]
    try:
        import grpc

        from quartet.shared.client.channel import HEALTH_CHECK, HEALTH_REQUEST, HEALTH_SERVING
        from quartet.shared.client.tls import Target
    except ImportError:
        return "grpcio is not installed; run: pip install 'quartet[client]'"
    try:
        target = Target(**connection)
    except ValueError as error:
        return str(error)
    with target.channel() as channel:
        try:
            key = os.environ.get("QUARTET_API_KEY")
            metadata = [("authorization", f"Bearer {key}")] if key else None
            answer: bytes = channel.unary_unary(HEALTH_CHECK)(HEALTH_REQUEST, timeout=timeout, metadata=metadata)
        except grpc.RpcError as error:
            return f"{address}: {error.code().name}: {error.details()}"
    return None if answer.startswith(HEALTH_SERVING) else f"{address}: not ready"
