"""The tokenizer with one fault: `python tokenizer.py FAULT [flags]`. What the conformance kit has to find."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from quartet.services.tokenizer import __main__, core, stop_strings
from quartet.services.tokenizer.core import TokenizerCore
from quartet.services.tokenizer.detokenizer import Detokenizer
from quartet.services.tokenizer.grammar_check import GrammarChecker
from quartet.services.tokenizer.request import Request
from quartet.services.tokenizer.service import TokenizerService
from quartet.services.tokenizer.stop_strings import StopStrings
from quartet.services.tokenizer.stream import OutputStream
from quartet.services.tokenizer.watching import Watching
from quartet.shared import link
from quartet.shared.link import DialerLink
from quartet.shared.messages import ChoicePast, Finish, Message, Release


def forgets_session_check() -> None:
    original = DialerLink.on_frame
    DialerLink.on_frame = lambda self, session, payload: original(  # type: ignore[method-assign]
        self, self._session, payload
    )


def ignores_reset() -> None:
    original = DialerLink._open

    def reopen(self: DialerLink, reason: str) -> None:
        if "does not know" not in reason:
            original(self, reason)

    DialerLink._open = reopen  # type: ignore[method-assign]


def takes_any_version() -> None:
    link.incompatible = lambda hello: None


def is_always_ready() -> None:
    TokenizerService._ready = lambda self: True  # type: ignore[method-assign]


def emits_half_characters() -> None:
    def feed(self: Detokenizer, token_ids: Sequence[int]) -> str:
        table = self._bytes
        return "".join(table[i].decode(errors="replace") for i in token_ids if 0 <= i < len(table))

    Detokenizer.feed = feed  # type: ignore[method-assign]


def counts_characters() -> None:
    original = OutputStream._take_text

    def take(self: OutputStream, text: str) -> str:
        text = original(self, text)
        self._text_bytes -= len(text.encode()) - len(text)
        return text

    OutputStream._take_text = take  # type: ignore[method-assign]


def stops_only_within_a_piece() -> None:
    original = StopStrings.feed

    def feed(self: StopStrings, piece: str, honour: bool = True) -> Any:
        self._state = 0
        fed = original(self, piece, honour)
        held, self._held = self._held, ""
        return fed._replace(text=fed.text + held)

    StopStrings.feed = feed  # type: ignore[method-assign]


def swallows_held_text() -> None:
    stop_strings.StopStrings.release = lambda self: ""  # type: ignore[method-assign]


def never_tells_finish() -> None:
    original = TokenizerCore._to_scheduler

    def to_scheduler(self: TokenizerCore, message: Message) -> None:
        if not isinstance(message, Finish):
            original(self, message)

    TokenizerCore._to_scheduler = to_scheduler  # type: ignore[method-assign]


def keeps_releases() -> None:
    original = TokenizerCore._to_scheduler

    def to_scheduler(self: TokenizerCore, message: Message) -> None:
        if not isinstance(message, Release):
            original(self, message)

    TokenizerCore._to_scheduler = to_scheduler  # type: ignore[method-assign]


def loses_the_past() -> None:
    original = Request.new_request

    def new_request(self: Request, *arguments: Any) -> Any:
        message = original(self, *arguments)
        message.choices = [ChoicePast(past.index) for past in message.choices]
        return message

    Request.new_request = new_request  # type: ignore[method-assign]


def lets_gaps_pass() -> None:
    original = TokenizerCore._output

    def output(self: TokenizerCore, request: Request, output: Any) -> None:
        output.start = min(output.start, len(request.choices[output.index].token_ids))
        original(self, request, output)

    TokenizerCore._output = output  # type: ignore[method-assign]


def repeats_outputs() -> None:
    original = TokenizerCore._output

    def output(self: TokenizerCore, request: Request, output: Any) -> None:
        output.start = max(output.start, len(request.choices[output.index].token_ids))
        original(self, request, output)

    TokenizerCore._output = output  # type: ignore[method-assign]


def ignores_attempts() -> None:
    original = TokenizerCore.outputs

    def outputs(self: TokenizerCore, message: Any) -> None:
        for item in message.items:
            if item.request_id in self._requests:
                item.attempt = self._requests[item.request_id].attempt
        original(self, message)

    TokenizerCore.outputs = outputs  # type: ignore[method-assign]


def drops_a_dead_gateways_requests() -> None:
    original = TokenizerCore.gateway_down

    def gateway_down(self: TokenizerCore, gateway: Any) -> None:
        original(self, gateway)
        for request in [r for r in self._requests.values() if r.owner is None]:
            self._forget(request)

    TokenizerCore.gateway_down = gateway_down  # type: ignore[method-assign]


def refuses_nothing() -> None:
    core.check_request = lambda field, ids, sampling, pasts, loaded, model: 100


def keeps_its_vocabulary() -> None:
    TokenizerCore._tell_vocabulary = lambda self: None  # type: ignore[method-assign]


def compiles_nothing() -> None:
    GrammarChecker.check = lambda self, submit: submit.sampling.structured  # type: ignore[method-assign]


def forgets_who_watches() -> None:
    original = TokenizerCore.scheduler_down

    def scheduler_down(self: TokenizerCore) -> None:
        self._watching = Watching()
        original(self)

    TokenizerCore.scheduler_down = scheduler_down  # type: ignore[method-assign]


# Each fault with the scenario that meets it and the rule that must be named.
FAULTS: dict[Callable[[], None], tuple[str, str]] = {
    forgets_session_check: ("gateway_link", "link.fencing"),
    ignores_reset: ("gateway_link", "link.reset"),
    takes_any_version: ("gateway_link", "link.version"),
    is_always_ready: ("heartbeats", "link.ready"),
    emits_half_characters: ("text", "delta.characters"),
    counts_characters: ("text", "delta.bytes"),
    stops_only_within_a_piece: ("stop_strings", "stop.cut"),
    swallows_held_text: ("stop_strings", "stop.release"),
    never_tells_finish: ("stop_strings", "stop.finish"),
    keeps_releases: ("ends", "forward.release"),
    loses_the_past: ("scheduler_restart", "ledger.scheduler"),
    lets_gaps_pass: ("gaps_and_duplicates", "ledger.gap"),
    repeats_outputs: ("gaps_and_duplicates", "ledger.duplicate"),
    ignores_attempts: ("attempts", "request.attempts"),
    drops_a_dead_gateways_requests: ("attach", "attach.found"),
    refuses_nothing: ("refusals", "refuse.field"),
    keeps_its_vocabulary: ("structured_submits", "structured.passed"),
    compiles_nothing: ("structured_submits", "structured.refused"),
    forgets_who_watches: ("watching_gateway", "watch.ended"),
}

if __name__ == "__main__":
    {fault.__name__: fault for fault in FAULTS}[sys.argv[1]]()
    raise SystemExit(__main__.main(sys.argv[2:]))
