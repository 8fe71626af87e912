"""What a request's output must be, from its structured output and its tools; refused before anything is scheduled."""

from __future__ import annotations

import threading
from collections import OrderedDict

from llguidance import LLMatcher, LLTokenizer

from quartet.services.tokenizer.loaded import LoadedTokenizer
from quartet.services.tokenizer.prompt_encoder import Refusal
from quartet.services.tokenizer.tool_formats import ToolFormat, calls_or
from quartet.shared.messages import ChoicePast, ErrorCode, Submit
from quartet.shared.sampling_params import StructuredOutput, ToolChoice
from quartet.shared.structured_output import NO_TOKEN, GrammarError, build_vocabulary, compile_grammar, in_lark, why

MAX_REMEMBERED = 256
MAX_REMEMBERED_BYTES = 4 << 20


class GrammarChecker:
    """Thread-safe; compiling takes long for some texts and belongs off the event loop. What it may cost is bounded
    by the library's own measure, so no thread is lost to it. Remembers what it has let pass."""

    def __init__(self, loaded: LoadedTokenizer, tool_format: ToolFormat | None) -> None:
        self._loaded = loaded
        self._tool_format = tool_format
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._passed: OrderedDict[StructuredOutput, None] = OrderedDict()
        self._num_bytes = 0

    @staticmethod
    def is_needed(submit: Submit) -> bool:
        return submit.sampling.structured is not None or submit.tools is not None

    def warm_up(self) -> None:
        """So that no request waits for the vocabulary."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = build_vocabulary(self._loaded.token_bytes, sorted(self._loaded.special_ids))

    def check(self, submit: Submit) -> StructuredOutput | None:
        """What the executor is to keep the output to, a grammar in Lark's notation; None: anything. Raises Refusal."""
        tools, answer = submit.tools, submit.sampling.structured
        try:
            required = answer = in_lark(answer) if answer is not None else None
        except GrammarError as error:
            raise _refusal("structured", str(error)) from error
        field = "structured"
        if tools is not None and tools.choice is not ToolChoice.NONE:
            if self._tool_format is None:
                raise _refusal("tools", "it is not known how this model writes tool calls: see --tool-parser")
            if tools.choice is ToolChoice.REQUIRED and answer is not None:
                raise _refusal("tool_choice", "where a call is required, the output cannot be structured otherwise")
            required = calls_or(self._tool_format, tools, self._loaded, answer)
            field = "structured" if required is answer else "tools"
        if required is None:
            return None
        if not self._loaded.eos_token_ids and not submit.sampling.stop_token_ids:
            raise _refusal(field, "the model has no end-of-sequence token, so stop_token_ids must be given")
        pasts = [past for past in submit.choices if past.output_token_ids]
        try:
            if pasts or not self._has_passed(required):
                matcher = self._compile(required)
                end_ids = {*self._loaded.eos_token_ids, *submit.sampling.stop_token_ids}
                for past in pasts:
                    self._follow(matcher.deep_copy(), past, end_ids, field)
        except GrammarError as error:
            raise _refusal(field, str(error)) from error
        return required

    def _follow(self, matcher: LLMatcher, past: ChoicePast, end_ids: set[int], field: str) -> None:
        """Whether an output could have begun like this. Raises Refusal: for the executor it would be too late to say
        that the request is wrong. Ids outside the vocabulary are refused elsewhere."""
        token_ids = past.output_token_ids
        if not 0 <= min(token_ids) <= max(token_ids) < self._loaded.vocab_size:
            return
        ended = token_ids[-1] in end_ids
        text = token_ids[:-1] if ended else token_ids
        num_right = next((i for i, token_id in enumerate(text) if token_id in end_ids), len(text))
        if num_right:
            num_right = matcher.try_consume_tokens(text[:num_right])
        if matcher.is_error():
            raise _refusal(field, why(matcher))
        if num_right < len(text) or (ended and not matcher.is_accepting()):
            token = f"token {num_right} of choice {past.index}, id {token_ids[num_right]}"
            raise _refusal("past_token_ids", f"{token}, is none that {field} allows there")

    def _has_passed(self, structured: StructuredOutput) -> bool:
        with self._lock:
            if structured not in self._passed:
                return False
            self._passed.move_to_end(structured)
            return True

    def _compile(self, structured: StructuredOutput) -> LLMatcher:
        """Raises GrammarError."""
        self.warm_up()
        assert self._vocabulary is not None
        matcher = compile_grammar(structured, self._vocabulary)
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(why(matcher))
        if not any(mask):
            raise GrammarError(NO_TOKEN)
        with self._lock:
            if structured not in self._passed:
                self._passed[structured] = None
                self._num_bytes += len(structured.text)
            while len(self._passed) > MAX_REMEMBERED or self._num_bytes > MAX_REMEMBERED_BYTES:
                self._num_bytes -= len(self._passed.popitem(last=False)[0].text)
        return matcher


def _refusal(field: str, message: str) -> Refusal:
    return Refusal(ErrorCode.INVALID_ARGUMENT, f"{field}: {message}", field)
