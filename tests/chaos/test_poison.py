"""A request that itself kills the executor is found and failed; the others go on unharmed."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

POISON = 49_000


class Keeper:
    """Starts the executor again whenever it dies, as a supervisor does."""

    def __init__(self, stack: Any) -> None:
        self.stack = stack
        self.deaths = 0
        self._stopping = False
        self._start()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _start(self) -> None:
        with self.stack.log("executor").open("ab") as log:
            self.stack.processes["executor"] = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("poisoned_executor.py"))],
                env=self.stack.environ | {"POISON_TOKEN_ID": str(POISON)},
                stdout=log,
                stderr=log,
            )

    def _keep(self) -> None:
        while True:
            code = self.stack.processes["executor"].wait()
            if self._stopping:
                return
            assert code == 70, code
            self.deaths += 1
            self._start()

    def stop(self) -> None:
        self._stopping = True
        self.stack.processes["executor"].terminate()
        self._thread.join(20)


@pytest.mark.slow
def test_poison_is_failed_and_the_others_go_on(line: Any, streams: Any) -> None:
    stack = line(without=("executor",))
    keeper = Keeper(stack)
    stack.client.wait_ready(90)
    running = streams(stack, 4, max_tokens=120).begun()
    message = stack.client.refused([1, 2, POISON, 4], grpc.StatusCode.INTERNAL, max_tokens=5)
    assert "died" in message and keeper.deaths == 3
    running.check()
    assert keeper.deaths == 3
    keeper.stop()
