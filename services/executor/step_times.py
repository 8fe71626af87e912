"""Where the executor's main thread spends its time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, get_args

Phase = Literal["idle", "host", "forward", "logits", "sampling"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class StepTimes:
    """Totals since `clear`; every moment of the thread that runs the steps goes to one phase.

    idle      waiting for a plan, or using the time
    host      rows, batches, block hashes, results: what is neither of these
    forward   the decoder's layers
    logits    the head, log-probabilities of prompts
    sampling  from logits to the rows' next tokens
    """

    def __init__(
        self,
        forward_parts: Callable[[], dict[str, float]] = dict,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`forward_parts`: cumulative seconds of what the decoder tells apart in its layers, if anything."""
        self.clock = clock
        # Set while somebody wants each part told: its phase, start and end, by the clock.
        self.spans: list[tuple[Phase, float, float]] | None = None
        self._forward_parts = forward_parts
        self.clear()

    def clear(self) -> None:
        self.num_steps = 0
        self.num_tokens = 0
        self.num_sampled = 0
        self.seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._before = self._forward_parts()
        self._last = self.clock()

    def spent(self, phase: Phase) -> None:
        """The time since the last call, of any phase, went to this one."""
        now = self.clock()
        self.seconds[phase] += now - self._last
        if self.spans is not None:
            self.spans.append((phase, self._last, now))
        self._last = now

    def count(self, num_tokens: int, num_sampled: int) -> None:
        """One step, its tokens, and how many of its rows sampled."""
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.num_sampled += num_sampled

    def forward_seconds(self) -> dict[str, float]:
        """What the decoder tells apart in phase forward, since `clear`."""
        return {name: total - self._before.get(name, 0.0) for name, total in self._forward_parts().items()}

    def totals(self) -> dict[str, Any]:
        return {
            "num_steps": self.num_steps,
            "num_tokens": self.num_tokens,
            "num_sampled": self.num_sampled,
            "seconds": {name: round(total, 6) for name, total in self.seconds.items()},
            "forward": {name: round(total, 6) for name, total in self.forward_seconds().items()},
        }
