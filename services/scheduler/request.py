"""A choice of a request, as the scheduler runs it, and the request its choices belong to."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import msgspec

from quartet.shared.block_hash import block_hash, hash_root, pack_token_ids
from quartet.shared.messages import ChoicePast, FinishReason, NewRequest, Output, TokenLogprobs
from quartet.shared.trace_context import checked

if TYPE_CHECKING:
    from quartet.services.scheduler.free_block_queue import KVCacheBlock

# A position that no sequence reaches.
NEVER = 1 << 62


class RequestStatus(enum.IntEnum):
    """In rising order, so that `>= FINISHED` means that nothing more is computed."""

    NEW = 0  # not queued yet
    WAITING = 1
    PREEMPTED = 2
    RUNNING = 3
    FINISHED = 4  # retained until Release
    DROPPED = 5  # no longer in the ledger


class Owner:
    """A tokenizer's session: whom a request's outputs go to. `down_since` is set while it is gone."""

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.down_since: float | None = None
        self.outbox: list[Output] = []
        self.request_ids: set[int] = set()


class RequestGroup:
    """One NewRequest: what its choices share. `prompt_logprobs` holds the entries from position
    `prompt_logprobs_base` on, so that another owner can be sent them again. `arrival` counts requests,
    `arrived_at` is by the clock in seconds."""

    def __init__(self, message: NewRequest, owner: Owner, arrival: int, arrived_at: float) -> None:
        self._message = message
        self.request_id = message.request_id
        self.attempt = message.attempt
        self.owner = owner
        self.arrival = arrival
        self.arrived_at = arrived_at
        self.prompt_token_ids = message.prompt_token_ids
        self.sampling = message.sampling
        self.eos_token_ids = [] if message.sampling.ignore_eos else message.eos_token_ids
        self.priority = message.priority
        self.cache_salt = message.cache_salt
        self.tenant = message.tenant
        self.read_prefix_cache = message.read_prefix_cache
        self.write_prefix_cache = message.write_prefix_cache
        self.vocabulary = message.vocabulary
        self.trace_context = checked(message.trace_context)
        self.hash_root = hash_root([("cache_salt", message.cache_salt)] if message.cache_salt else [])
        self.stop_ids = frozenset(self.eos_token_ids).union(message.sampling.stop_token_ids)
        self.choices: dict[int, Request] = {}
        self.prompt_block_hashes: list[bytes] = []
        self.prompt_logprobs_base = message.prompt_logprobs_start
        self.prompt_logprobs: list[TokenLogprobs | None] = []

    def same_question(self, message: NewRequest) -> bool:
        """Whether a NewRequest asks for what this group was made for."""
        return (
            message.prompt_token_ids == self.prompt_token_ids
            and message.sampling == self.sampling
            and message.cache_salt == self.cache_salt
        )

    def ask_again(self, choices: list[ChoicePast]) -> NewRequest:
        """The request as it would be submitted now."""
        return msgspec.structs.replace(
            self._message,
            attempt=self.attempt,
            choices=choices,
            prompt_logprobs_start=self.next_prompt_logprob,
        )

    @property
    def next_prompt_logprob(self) -> int:
        return self.prompt_logprobs_base + len(self.prompt_logprobs)

    @property
    def prompt_logprobs_due(self) -> bool:
        return self.sampling.prompt_logprobs is not None and self.next_prompt_logprob < len(self.prompt_token_ids)


class Request:
    """One choice. The key is (request_id, index).

    token_ids             prompt, then all outputs known
    num_computed_tokens   in KV memory once every plan sent so far has run; counts plans in flight
    names_blocks          whether blocks that it fills are named, for others to find
    num_hashed_blocks     leading blocks that a step has filled and returned, and that are named
    last_position         no token may be computed from this position on: its output would be too many
    next_edge             the num_computed_tokens at which decoding needs a look: a block edge or the end
    hash_edge             the number of returned tokens at which another block is full
    last_plan             sequence number of the last plan that names it; -1 before the first
    scoring               the finish that was known beforehand: it runs only for its prompt logprobs
    queued_at, admitted_at, first_token_at, stopped_at, num_computed_before     for metrics alone
    """

    __slots__ = (
        "admitted_at",
        "attempt",
        "block_hashes",
        "blocks",
        "death_position",
        "finish_reason",
        "first_token_at",
        "flow",
        "group",
        "hash_edge",
        "index",
        "last_plan",
        "last_position",
        "max_tokens",
        "names_blocks",
        "next_edge",
        "num_cached_tokens",
        "num_computed_before",
        "num_computed_tokens",
        "num_deaths",
        "num_hashed_blocks",
        "num_past_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "outbox",
        "output_logprobs",
        "policy_key",
        "queued_at",
        "req_index",
        "request_id",
        "scoring",
        "status",
        "stop_ids",
        "stop_reason",
        "stopped_at",
        "token_ids",
        "was_scheduled",
    )

    def __init__(self, group: RequestGroup, past: ChoicePast) -> None:
        sampling = group.sampling
        self.group = group
        self.request_id = group.request_id
        self.attempt = group.attempt
        self.index = past.index
        self.outbox = group.owner.outbox
        self.num_prompt_tokens = len(group.prompt_token_ids)
        self.num_past_tokens = len(past.output_token_ids)
        self.token_ids = group.prompt_token_ids + past.output_token_ids
        self.output_logprobs: list[TokenLogprobs | None] | None = None if sampling.logprobs is None else []
        self.max_tokens = NEVER if sampling.max_tokens is None else sampling.max_tokens
        self.stop_ids = group.stop_ids
        self.status = RequestStatus.NEW
        self.policy_key: tuple[Any, ...] = ()
        self.flow: Hashable = ""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self.scoring: tuple[FinishReason, int | None] | None = None
        self.req_index = -1
        self.blocks: list[KVCacheBlock] = []
        self.block_hashes: list[bytes] = []
        self.num_computed_tokens = 0
        self.names_blocks = False
        self.num_hashed_blocks = 0
        self.num_cached_tokens = 0
        self.was_scheduled = False
        self.num_preemptions = 0
        self.num_deaths = 0
        self.death_position = 0
        self.last_plan = -1
        self.next_edge = 0
        self.hash_edge = NEVER
        self.last_position = self.num_prompt_tokens + self.max_tokens - 1
        self.queued_at = group.arrived_at
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.stopped_at: float | None = None
        self.num_computed_before = 0

    def __repr__(self) -> str:
        return f"Request({self.request_id:016x}/{self.index} {self.status.name} {len(self.token_ids)} tokens)"

    def own(self, group: RequestGroup) -> None:
        """Takes over the group's attempt and owner."""
        self.attempt = group.attempt
        self.outbox = group.owner.outbox

    def limit_to(self, max_model_len: int) -> None:
        """Ends the choice where the context is full."""
        self.last_position = min(self.num_prompt_tokens + self.max_tokens, max_model_len) - 1

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens still to compute if it runs to max_tokens; all of them while it has no place."""
        return self.last_position + 1 - self.num_computed_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """The first choice computes the prompt's log-probabilities for all."""
        return self.group.prompt_logprobs_due and self is next(iter(self.group.choices.values()), None)

    def finish_condition(self) -> tuple[FinishReason, int | None] | None:
        """(finish_reason, stop_reason) when the last known token ends the choice."""
        num_output_tokens = self.num_output_tokens
        if num_output_tokens > 0 and num_output_tokens >= self.group.sampling.min_tokens:
            token_id = self.token_ids[-1]
            if token_id in self.stop_ids:
                return FinishReason.STOP, None if token_id in self.group.eos_token_ids else token_id
        if len(self.token_ids) > self.last_position:
            return FinishReason.LENGTH, None
        return None

    def truncate(self, num_output_tokens: int) -> None:
        """Forgets the outputs past a stop string."""
        del self.token_ids[self.num_prompt_tokens + num_output_tokens :]
        if self.output_logprobs is not None:
            del self.output_logprobs[max(0, num_output_tokens - self.num_past_tokens) :]

    def score_only(self, finish: tuple[FinishReason, int | None]) -> None:
        """It ends as `finish` says once its known tokens have been computed."""
        self.scoring = finish
        self.last_position = len(self.token_ids) - 1

    def output(self, start: int) -> Output:
        """Everything known from output `start` on, with the finish where there is one."""
        return Output(
            request_id=self.request_id,
            attempt=self.attempt,
            index=self.index,
            start=start,
            token_ids=self.token_ids[self.num_prompt_tokens + start :],
            logprobs=self._logprobs(start),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            num_cached_tokens=self.num_cached_tokens,
        )

    def _logprobs(self, start: int) -> list[TokenLogprobs] | None:
        if self.output_logprobs is None:
            return None
        return [entry for entry in self.output_logprobs[start - self.num_past_tokens :] if entry is not None]

    def hashes(self, num_blocks: int, block_size: int) -> list[bytes]:
        """At least the first num_blocks block hashes; each is computed once, the prompt's once per group."""
        if len(self.block_hashes) < num_blocks:
            shared = self.group.prompt_block_hashes
            if not self.block_hashes:
                num_shared = min(num_blocks, self.num_prompt_tokens // block_size)
                self._extend(shared, num_shared, block_size)
                self.block_hashes = shared.copy()
            self._extend(self.block_hashes, num_blocks, block_size)
        return self.block_hashes

    def _extend(self, hashes: list[bytes], num_blocks: int, block_size: int) -> None:
        parent = hashes[-1] if hashes else self.group.hash_root
        for i in range(len(hashes), num_blocks):
            parent = block_hash(parent, pack_token_ids(self.token_ids[i * block_size : (i + 1) * block_size]))
            hashes.append(parent)
