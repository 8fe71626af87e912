"""Attach to a request that is not in the ledger: which tokenizer remembers it from an earlier gateway?"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quartet.services.gateway.choice import MAX_TEXT_BYTES, Choice, Position
from quartet.services.gateway.events import StreamError
from quartet.services.gateway.stream import Stream
from quartet.services.gateway.subscription import Subscription
from quartet.services.gateway.tokenizer import Peer
from quartet.shared.messages import Attach, Attached, ErrorCode, Submit, TokensPrompt
from quartet.shared.received import are_token_ids
from quartet.shared.sampling_params import MAX_TOKEN_ID, NO_CAPS, InvalidField, TextParams, validate, validate_tools
from quartet.shared.trace_context import checked


class Search:
    """One client's Attach, and whom it was put to."""

    def __init__(
        self,
        subscription: Subscription,
        positions: dict[int, Position],
        prompt_logprobs_start: int,
        detach_grace: float,
    ) -> None:
        self.subscription = subscription
        self.positions = positions
        self.prompt_logprobs_start = prompt_logprobs_start
        self.detach_grace = detach_grace
        self.deadline = 0.0
        # With which attempt each was asked; those that said no have left.
        self.asked: dict[Peer, int] = {}


class Searches:
    """All that are open. The first tokenizer that knows the request has it; when all say no, or none
    says anything within `timeout` seconds, it is NOT_FOUND."""

    def __init__(self, timeout: float, clock: Callable[[], float], mint_attempt: Callable[[], int]) -> None:
        self._timeout = timeout
        self._clock = clock
        self._mint_attempt = mint_attempt
        self._started_at = clock()
        self._open: dict[int, Search] = {}

    def __len__(self) -> int:
        return len(self._open)

    def start(self, request_id: int, search: Search, peers: Iterable[Peer]) -> None:
        earlier = self._open.pop(request_id, None)
        if earlier is not None:
            earlier.subscription.fail(taken_over())
        search.deadline = self._clock() + self._timeout
        self._open[request_id] = search
        for peer in peers:
            self._ask(request_id, search, peer)

    def found(self, peer: Peer, message: Attached) -> Stream | None:
        """The stream that a tokenizer remembers, with its subscription; None when it is not wanted."""
        search = self._open.get(message.request_id)
        if search is None or search.asked.get(peer) != message.attempt:
            return None
        if not _can_be(message):
            self._remove(message.request_id, search, peer)
            return None
        del self._open[message.request_id]
        stream = _stream_of(message.submit, search)
        try:
            search.subscription.start(stream, search.positions, search.prompt_logprobs_start)
        except StreamError as error:
            search.subscription.fail(error)
            return None
        stream.subscription = search.subscription
        search.subscription.wake()
        return stream

    def said_no(self, peer: Peer, request_id: int, attempt: int) -> bool:
        """Whether this was an answer to a search."""
        search = self._open.get(request_id)
        if search is None or search.asked.get(peer) != attempt:
            return False
        self._remove(request_id, search, peer)
        return True

    def on_up(self, peer: Peer) -> None:
        for request_id, search in self._open.items():
            self._ask(request_id, search, peer)

    def on_down(self, peer: Peer) -> None:
        for request_id, search in list(self._open.items()):
            if peer in search.asked:
                self._remove(request_id, search, peer)

    def tick(self) -> None:
        for request_id, search in list(self._open.items()):
            if self._clock() >= search.deadline:
                self._not_found(request_id)

    def drop(self, subscription: Subscription) -> None:
        """The client has left."""
        for request_id, search in list(self._open.items()):
            if search.subscription is subscription:
                del self._open[request_id]

    def end_all(self, error: StreamError) -> None:
        while self._open:
            self._open.popitem()[1].subscription.fail(error)

    def _ask(self, request_id: int, search: Search, peer: Peer) -> None:
        # An attempt for each, so that one's answer is never taken for another's.
        attempt = self._mint_attempt()
        next_index = {index: position.next_index for index, position in search.positions.items()}
        if peer.send(Attach(request_id, attempt, next_index)):
            search.asked[peer] = attempt

    def _remove(self, request_id: int, search: Search, peer: Peer) -> None:
        del search.asked[peer]
        # Soon after the start, tokenizers that have not dialled in yet may know the request.
        if not search.asked and self._clock() - self._started_at > self._timeout:
            self._not_found(request_id)

    def _not_found(self, request_id: int) -> None:
        message = f"request_id: {request_id:016x} is not known (any more)"
        self._open.pop(request_id).subscription.fail(StreamError(ErrorCode.NOT_FOUND, message))


def _can_be(message: Attached) -> bool:
    """Whether a stream can be made of it, and submitted again."""
    submit = message.submit
    try:
        # What an earlier gateway let in may be more than this one's caps.
        validate(submit.sampling, TextParams(), 1, NO_CAPS)
        if submit.tools is not None:
            validate_tools(submit.tools, NO_CAPS)
    except InvalidField:
        return False
    return (
        submit.request_id == message.request_id
        and isinstance(submit.prompt, TokensPrompt)
        and bool(submit.prompt.token_ids)
        and are_token_ids(submit.prompt.token_ids)
        and 0 <= submit.prompt_logprobs_start <= len(submit.prompt.token_ids)
        and all(
            0 <= past.index <= MAX_TOKEN_ID
            and are_token_ids(past.output_token_ids)
            and 0 <= (past.sent_bytes or 0) <= MAX_TEXT_BYTES
            and 0 <= (past.sent_call_bytes or 0) <= MAX_TEXT_BYTES
            for past in submit.choices
        )
    )


def taken_over() -> StreamError:
    return StreamError(ErrorCode.ABORTED, "another Attach has taken the stream over")


def _stream_of(submit: Submit, search: Search) -> Stream:
    """A stream as a tokenizer remembers it. Choices that only the client tells of had finished."""
    told = {index: position for index, position in search.positions.items() if position.finished}
    choices = {
        past.index: Choice(past.index, past.output_token_ids, past.sent_bytes, sent_call_bytes=past.sent_call_bytes)
        for past in submit.choices
        if past.index not in told
    }
    choices |= {index: Choice(index, finished_at=position.next_index) for index, position in told.items()}
    stream = Stream(
        submit.request_id,
        submit.prompt,
        submit.sampling,
        submit.text,
        [choices[index] for index in sorted(choices)],
        priority=submit.priority,
        cache_salt=submit.cache_salt,
        tenant=submit.tenant,
        detach_grace=search.detach_grace,
        prompt_logprobs_start=submit.prompt_logprobs_start,
        tools=submit.tools,
        read_prefix_cache=submit.read_prefix_cache,
        write_prefix_cache=submit.write_prefix_cache,
        trace_context=checked(submit.trace_context),
    )
    stream.accepted = stream.adopted = True
    return stream
