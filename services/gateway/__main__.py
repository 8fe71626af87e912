"""`python -m quartet.services.gateway`: runs the gateway."""

from __future__ import annotations

import os
import sys

import uvloop

from quartet.services.gateway.settings import GatewaySettings
from quartet.shared.config import EXIT_SETTINGS_ERROR, SettingsError, load_settings
from quartet.shared.log import configure_logging


def main(argv: list[str] | None = None) -> int:
    settings = load_settings(
        GatewaySettings,
        section="gateway",
        argv=sys.argv[1:] if argv is None else argv,
        description="Takes requests over gRPC and streams their answers.",
    )
    configure_logging("gateway", settings.log_level, settings.log_format, settings.name)
    # gRPC's core writes lines of its own format to stderr, which is our log. It looks when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from quartet.services.gateway.service import serve
    from quartet.shared.transport import flush

    try:
        return uvloop.run(serve(settings))
    except SettingsError as error:  # one that takes more than its own text to check
        print(f"quartet gateway: {error}", file=sys.stderr)
        return EXIT_SETTINGS_ERROR
    finally:
        flush()


if __name__ == "__main__":
    sys.exit(main())
