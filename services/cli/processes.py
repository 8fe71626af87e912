"""Child processes that cannot outlive their parent, and signals as something to wait for."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

_PR_SET_PDEATHSIG = 1
# Python's objects in huge pages, where the C library is glibc. A service that wakes for one token touches hundreds of
# pages, and finding them again costs more than the work; most so in a virtual machine. Takes about 30 MB in all.
HUGE_PAGES = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def die_with_parent() -> Callable[[], None] | None:
    """Runs in the child before exec: the kernel kills it when its parent is gone, even by SIGKILL."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def arm() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return arm


class Process:
    """A child in its own process group: the terminal's Ctrl-C does not reach it, a kill reaches all of it."""

    def __init__(self, command: Sequence[str], quiet: bool = False) -> None:
        """`quiet` drops its standard output; its standard error always goes where ours does."""
        self._popen = subprocess.Popen(
            list(command),
            env={**HUGE_PAGES, **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if quiet else None,
            process_group=0,
            preexec_fn=die_with_parent(),
        )
        self.pid = self._popen.pid

    def terminate(self) -> None:
        """SIGTERM to the process alone, which sees to its own children."""
        if self._popen.returncode is None:
            self._popen.terminate()

    def kill(self) -> None:
        """SIGKILL to everything in its group."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        """Exit status (negative: by that signal) once it is gone, and then nothing of its group is left."""
        if self._popen.returncode is None:
            # The zombie is looked at first and reaped last, so the group's id cannot belong to anyone else yet.
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        return self._popen.wait()


class SignalInbox:
    """SIGTERM, SIGINT, SIGHUP and SIGCHLD wake `wait`. Use as a context manager in the main thread."""

    STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __enter__(self) -> SignalInbox:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, lambda *_: None) for number in (*self.STOP, signal.SIGCHLD)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._read)
        os.close(self._write)

    def wait(self, timeout: float | None) -> bool:
        """Whether a stop signal came; returns early on any signal."""
        if not select.select([self._read], [], [], timeout)[0]:
            return False
        return any(number in self.STOP for number in os.read(self._read, 4096))
