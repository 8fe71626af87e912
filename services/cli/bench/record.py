"""A request as the client saw it."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence

Message = dict[str, str]
Prompt = list[int] | str | list[Message]
"""Token ids, a text to be continued, or a chat's messages."""


@dataclasses.dataclass(slots=True)
class Record:
    """Times are seconds of time.perf_counter: when it was sent, when each chunk with a token or text came, its end,
    and when it was due to be sent (0: whenever; the first of a conversation, at a rate). Token counts are the server's
    where it tells them. `error` is its kind, "" where there was none."""

    started: float
    times: Sequence[float] = dataclasses.field(default_factory=lambda: array("d"))
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ended: float = 0.0
    due: float = 0.0
    error: str = ""
    message: str = ""
    # What was said, where it is needed for the next turn.
    answer_ids: list[int] = dataclasses.field(default_factory=list)
    answer_text: str = ""

    def fail(self, kind: str, message: str) -> None:
        self.error, self.message = kind, message

    @property
    def time_to_first_token(self) -> float:
        return self.times[0] - self.started

    @property
    def latency(self) -> float:
        """Until its last token: what ends the stream comes with it or after."""
        return self.times[-1] - self.started

    @property
    def time_per_output_token(self) -> float | None:
        """Of the tokens after the first; None where there is none."""
        if self.output_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1)

    def gaps(self) -> list[float]:
        """Between chunks, which may hold several tokens."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]
