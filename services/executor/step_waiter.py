"""A thread that waits for the device, so that the main one can take the next plan meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol


class _Waitable(Protocol):
    def wait(self) -> None: ...


class StepWaiter:
    """Calls `notify` in its thread whenever a step that it was given has ended. Has no thread until it is needed:
    steps on a CPU are over when they have been launched."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._steps: queue.SimpleQueue[_Waitable | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def wait_for(self, step: _Waitable) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="step-waiter", daemon=True)
            self._thread.start()
        self._steps.put(step)

    def close(self) -> None:
        """Returns when the steps given have ended."""
        if self._thread is not None:
            self._steps.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            step.wait()
            self._notify()
