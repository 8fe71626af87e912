"""`python -m bench.gpu.scheduler_process FOLDER`: the scheduler, in a plain event loop."""

from __future__ import annotations

import asyncio
import sys

from quartet.services.scheduler.service import serve
from quartet.services.scheduler.settings import SchedulerSettings
from quartet.shared.log import configure_logging

if __name__ == "__main__":
    configure_logging("scheduler", "info", "console", "")
    sys.exit(asyncio.run(serve(SchedulerSettings(run_dir=sys.argv[1], enable_prefix_caching=False))))
