"""What a step brought: new tokens, finishes, blocks that may be shared from now on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from quartet.services.scheduler.plan import PlanInFlight, unpack_u32
from quartet.services.scheduler.request import Request, RequestGroup, RequestStatus
from quartet.services.scheduler.state import SchedulerState
from quartet.shared.messages import (
    FAILED_TOKEN_ID,
    Output,
    PromptLogprobs,
    RowPromptLogprobs,
    StepResult,
    TokenLogprobs,
)


class ResultMismatch(ValueError):
    """The result does not answer the oldest plan in flight."""


class StepUpdate:
    """What one result told beyond outputs, which are in the owners' outboxes."""

    def __init__(self) -> None:
        self.failed: dict[RequestGroup, str] = {}
        self.invalid: set[RequestGroup] = set()
        self.prompt_logprobs: list[tuple[RequestGroup, PromptLogprobs]] = []


def apply_result(state: SchedulerState, result: StepResult) -> StepUpdate:
    """Takes the oldest plan out of flight. Raises ResultMismatch, having changed nothing."""
    plan = state.in_flight[0] if state.in_flight else None
    if plan is None or plan.step_id != result.step_id:
        raise ResultMismatch(f"a result of step {result.step_id} does not answer step {plan and plan.step_id}")
    try:
        token_ids = unpack_u32(result.token_ids)
    except ValueError as error:
        raise ResultMismatch(f"step {result.step_id}: token_ids are cut short") from error
    sampling = plan.sampling()
    if len(token_ids) != len(sampling):
        raise ResultMismatch(f"step {result.step_id} gave {len(token_ids)} tokens for {len(sampling)} rows")
    if token_ids and state.model is not None and max(token_ids) >= state.model.vocab_size:
        # Such an id would travel in the next plan's rows, be refused there, and come again.
        unknown = [token_id for token_id in token_ids if state.model.vocab_size <= token_id != FAILED_TOKEN_ID]
        if unknown:
            raise ResultMismatch(f"step {result.step_id} gave token {unknown[0]}, outside of the vocabulary")
    logprobs = result.logprobs
    if logprobs is not None and len(logprobs) != len(sampling):
        raise ResultMismatch(f"step {result.step_id} gave {len(logprobs)} logprobs for {len(sampling)} rows")

    state.in_flight.popleft()
    state.last_returned = plan.sequence
    state.rows.release(plan.removed)
    if state.recorder is not None:
        state.recorder.returned(plan)
    update = StepUpdate()
    if result.errors or FAILED_TOKEN_ID in token_ids:
        _fail_rows(plan, result, sampling, token_ids, update)
    for prefill in plan.prefills:
        request = prefill.request
        if request.status is RequestStatus.RUNNING and request.group not in update.failed:
            state.kv.cache_full_blocks(request, prefill.num_computed_tokens)
    if result.prompt_logprobs:
        _pass_prompt_logprobs(plan, result.prompt_logprobs, update)
    if state.died:
        _acquit(state, plan)
    if state.policy_counts_tokens:
        state.policy.served([r for r in sampling if _gets_token(r, update)])
    num_output_tokens = state.totals.output_tokens
    _append_tokens(state, sampling, token_ids, itertools.repeat(None) if logprobs is None else logprobs, update)
    state.metrics.returned(plan, state.totals.output_tokens - num_output_tokens)
    return update


def _gets_token(request: Request, update: StepUpdate) -> bool:
    return request.status < RequestStatus.FINISHED and request.scoring is None and request.group not in update.failed


def _append_tokens(
    state: SchedulerState,
    sampling: list[Request],
    token_ids: list[int],
    logprobs: Iterable[TokenLogprobs | None],
    update: StepUpdate,
) -> None:
    """The hot loop: once per running request and step."""
    finished = RequestStatus.FINISHED
    cache_full_blocks = state.kv.cache_full_blocks
    failed = update.failed
    num_output_tokens = 0
    for request, token_id, entry in zip(sampling, token_ids, logprobs, strict=False):
        if request.status >= finished or (failed and request.group in failed):
            continue
        known = request.token_ids
        num_known = len(known)
        if num_known == request.hash_edge:
            cache_full_blocks(request, num_known)
        if request.scoring is not None:
            state.finish(request, *request.scoring)
            request.outbox.append(request.output(request.num_output_tokens))
            continue
        known.append(token_id)
        num_output_tokens += 1
        start = num_known - request.num_prompt_tokens
        finish_reason = stop_reason = entries = None
        if request.output_logprobs is not None:
            request.output_logprobs.append(entry)
            entries = [entry] if entry is not None else []
        if (num_known >= request.last_position or token_id in request.stop_ids) and (
            finish := request.finish_condition()
        ):
            finish_reason, stop_reason = finish
            state.finish(request, finish_reason, stop_reason)
        request.outbox.append(
            Output(
                request.request_id,
                request.attempt,
                request.index,
                start,
                [token_id],
                entries,
                finish_reason,
                stop_reason,
                request.num_cached_tokens,
            )
        )
    state.totals.output_tokens += num_output_tokens


def _fail_rows(
    plan: PlanInFlight, result: StepResult, sampling: list[Request], token_ids: list[int], update: StepUpdate
) -> None:
    rows = plan.rows()
    for req_index, message in result.errors:
        if req_index in rows:
            _fail(rows[req_index], message, update)
            if req_index in result.invalid_rows:
                update.invalid.add(rows[req_index].group)
    for request, token_id in zip(sampling, token_ids, strict=True):
        if token_id == FAILED_TOKEN_ID:
            _fail(request, "the executor could not sample a token", update)


def _fail(request: Request, message: str, update: StepUpdate) -> None:
    if request.status < RequestStatus.FINISHED:
        update.failed.setdefault(request.group, message)


def _pass_prompt_logprobs(plan: PlanInFlight, items: list[RowPromptLogprobs], update: StepUpdate) -> None:
    rows = plan.rows()
    for item in items:
        request = rows.get(item.req_index)
        if request is None or request.status >= RequestStatus.FINISHED or not request.wants_prompt_logprobs:
            continue
        group = request.group
        # Rows are told where to go on, so anything else is not to be believed.
        if item.start == group.next_prompt_logprob:
            group.prompt_logprobs.extend(item.entries)
            update.prompt_logprobs.append(
                (group, PromptLogprobs(group.request_id, group.attempt, item.start, item.entries))
            )


def _acquit(state: SchedulerState, plan: PlanInFlight) -> None:
    returned = [(p.request, p.num_computed_tokens) for p in plan.prefills]
    returned += [(request, len(request.token_ids)) for request in plan.decodes]
    for request, num_tokens in returned:
        if request in state.died and num_tokens >= request.death_position:
            state.acquit(request)
