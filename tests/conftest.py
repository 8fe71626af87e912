"""For every test."""

import os

# Where a process runs tests on each core, threads of torch that wait for one another only take turns.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
