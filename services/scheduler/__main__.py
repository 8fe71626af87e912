"""`python -m quartet.services.scheduler`: runs the scheduler."""

from __future__ import annotations

import sys

import uvloop

from quartet.services.scheduler.service import serve
from quartet.services.scheduler.settings import SchedulerSettings
from quartet.shared.config import EXIT_SETTINGS_ERROR, SettingsError, load_settings
from quartet.shared.log import configure_logging
from quartet.shared.transport import flush


def main(argv: list[str] | None = None) -> int:
    settings = load_settings(
        SchedulerSettings,
        section="scheduler",
        argv=sys.argv[1:] if argv is None else argv,
        description="Decides what each step of the executor computes.",
    )
    configure_logging("scheduler", settings.log_level, settings.log_format, settings.name)
    try:
        return uvloop.run(serve(settings))
    except SettingsError as error:  # one that takes more than its own text to check
        print(f"quartet scheduler: {error}", file=sys.stderr)
        return EXIT_SETTINGS_ERROR
    finally:
        flush()


if __name__ == "__main__":
    sys.exit(main())
