"""One choice's output as text: detokenizer, then stop strings, then tool calls, then what the client has already.

The text is a function of the ids alone, so a choice that moved here from elsewhere is replayed
through the same code and goes on where its client is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quartet.services.tokenizer.detokenizer import Detokenizer
from quartet.services.tokenizer.loaded import LoadedTokenizer
from quartet.services.tokenizer.stop_strings import Fed, StopStrings
from quartet.services.tokenizer.tool_calls import Parsed, ToolCallParser
from quartet.shared.messages import ToolCallDelta
from quartet.shared.sampling_params import SamplingParams, TextParams
from quartet.shared.tool_calls import after_call_bytes, num_call_bytes


class Piece(NamedTuple):
    """`num_tokens` of the tokens given were used: all, unless a stop string ended the text sooner."""

    text: str
    num_tokens: int
    tool_calls: list[ToolCallDelta]


class OutputStream:
    """`stop` is the stop string that ended the text.

    End-of-sequence and stop tokens have no text unless include_stop_str_in_output. With a parser, tool calls are
    taken out of the text; `marker_ids` are the special tokens that it looks for.
    """

    def __init__(
        self,
        loaded: LoadedTokenizer,
        sampling: SamplingParams,
        text: TextParams,
        parser: ToolCallParser | None = None,
        marker_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = Detokenizer(loaded, text.skip_special_tokens, marker_ids)
        self._parser = parser
        self._stops = StopStrings(text.stop, text.include_stop_str_in_output) if text.stop else None
        self._min_tokens = sampling.min_tokens
        self._silent = frozenset[int]()
        if not text.include_stop_str_in_output:
            self._silent = frozenset(sampling.stop_token_ids)
            if not sampling.ignore_eos:
                self._silent |= frozenset(loaded.eos_token_ids)
        self._num_tokens = 0
        self._unsent = ""
        self._sent_ahead = 0
        self._text_bytes = 0
        self._unsent_calls: list[ToolCallDelta] = []
        self._calls_sent_ahead = 0
        self._call_bytes = 0
        self.stop: str | None = None

    @property
    def num_text_bytes(self) -> int:
        """The UTF-8 bytes of all text let out so far, here or where the choice was before."""
        return self._text_bytes + self._sent_ahead

    @property
    def num_call_bytes(self) -> int:
        """Likewise of tool calls, see Delta."""
        return self._call_bytes + self._calls_sent_ahead

    def feed(self, token_ids: Sequence[int]) -> Piece:
        """What further tokens let out. After a stop string nothing more is used."""
        if self.stop is not None:
            return self._take(Parsed("", []), 0)
        silent = self._silent
        if self._stops is None:
            self._num_tokens += len(token_ids)
            text = self._detokenizer.feed([i for i in token_ids if i not in silent])
            return self._take(self._parse(text), len(token_ids))
        parts: list[str] = []
        used = 0
        # One by one: which token completed a stop string decides where the choice ends.
        for token_id in token_ids:
            used += 1
            self._num_tokens += 1
            if token_id not in silent:
                parts.append(self._through_stops(self._detokenizer.feed((token_id,))))
                if self.stop is not None:
                    break
        return self._take(self._parse("".join(parts), last=self.stop is not None), used)

    def finish(self) -> Piece:
        """The rest, when the choice has ended otherwise than by a stop string."""
        if self.stop is not None:
            return self._take(Parsed("", []), 0)
        text = self._through_stops(self._detokenizer.finish())
        if self._stops is not None and self.stop is None:
            text += self._stops.release()
        return self._take(self._parse(text, last=True), 0)

    def resume(self, token_ids: Sequence[int], sent_bytes: int | None, sent_call_bytes: int | None = None) -> None:
        """Replays a past. Of its text the client has `sent_bytes`, of its tool calls `sent_call_bytes` (None: all
        of it); what it has not comes out with the next piece."""
        text, _, tool_calls = self.feed(token_ids)
        if sent_bytes is not None and sent_bytes <= self._text_bytes:
            self._unsent = text.encode()[sent_bytes:].decode("utf-8", errors="ignore")
        elif sent_bytes is not None:
            self._sent_ahead = sent_bytes - self._text_bytes
        if sent_call_bytes is not None and sent_call_bytes <= self._call_bytes:
            self._unsent_calls = after_call_bytes(tool_calls, sent_call_bytes)
        elif sent_call_bytes is not None:
            self._calls_sent_ahead = sent_call_bytes - self._call_bytes

    def _parse(self, text: str, last: bool = False) -> Parsed:
        if self._parser is None:
            return Parsed(text, [])
        parsed = self._parser.feed(text)
        if not last:
            return parsed
        rest = self._parser.finish()
        return Parsed(parsed.text + rest.text, parsed.tool_calls + rest.tool_calls)

    def _through_stops(self, text: str) -> str:
        if self._stops is None or not text:
            return text
        fed: Fed = self._stops.feed(text, honour=self._num_tokens > self._min_tokens)
        self.stop = fed.stop
        return fed.text

    def _take(self, parsed: Parsed, num_tokens: int) -> Piece:
        return Piece(self._take_text(parsed.text), num_tokens, self._take_calls(parsed.tool_calls))

    def _take_text(self, text: str) -> str:
        self._text_bytes += len(text.encode())
        if self._sent_ahead and text:
            data = text.encode()
            skipped = min(self._sent_ahead, len(data))
            self._sent_ahead -= skipped
            text = data[skipped:].decode("utf-8", errors="ignore")
        if self._unsent:
            text, self._unsent = self._unsent + text, ""
        return text

    def _take_calls(self, parts: list[ToolCallDelta]) -> list[ToolCallDelta]:
        if parts:
            length = num_call_bytes(parts)
            self._call_bytes += length
            skipped = min(self._calls_sent_ahead, length)
            self._calls_sent_ahead -= skipped
            parts = after_call_bytes(parts, skipped)
        if self._unsent_calls:
            parts, self._unsent_calls = self._unsent_calls + parts, []
        return parts
