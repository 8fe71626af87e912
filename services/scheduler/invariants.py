"""What is true between any two events; tests ask after each."""

from __future__ import annotations

from quartet.services.scheduler.core import MAX_PLANS_IN_FLIGHT, SchedulerCore
from quartet.services.scheduler.request import Request, RequestStatus


def check_invariants(core: SchedulerCore) -> None:
    """Raises AssertionError naming what is wrong."""
    state = core.state
    running, waiting, preempted = set(state.running), set(state.waiting), set(state.preempted)
    for status, members in (
        (RequestStatus.RUNNING, running),
        (RequestStatus.WAITING, waiting),
        (RequestStatus.PREEMPTED, preempted),
    ):
        assert all(request.status is status for request in members), f"not all are {status.name}"
    choices = [request for group in core.ledger.groups.values() for request in group.choices.values()]
    unfinished = {request for request in choices if request.status < RequestStatus.FINISHED}
    assert unfinished == running | waiting | preempted, "the ledger and the queues disagree"
    assert set(state.suspects) <= set(state.died) <= unfinished and set(state.prefilling) <= running

    core.ledger.check_invariants()
    state.rows.check_invariants(running, [plan.removed for plan in state.in_flight])
    state.kv.pool.check_invariants(request.blocks for request in running)
    for request in waiting | preempted | {r for r in choices if r.status is RequestStatus.FINISHED}:
        assert not request.blocks and request.req_index == -1 and request.num_computed_tokens == 0, request
    decoding = set(state.rows.decodes())
    for request in running:
        _check_running(request, state.kv.block_size, request in state.prefilling, request in decoding)

    assert len(state.in_flight) <= MAX_PLANS_IN_FLIGHT
    assert len(running) <= state.max_num_seqs
    assert state.epoch is not None or not (running or state.in_flight)
    first = state.next_step_id - len(state.in_flight)
    for i, plan in enumerate(state.in_flight):
        assert plan.step_id == first + i and plan.sequence == state.last_returned + 1 + i
        assert plan.num_tokens <= state.max_num_batched_tokens


def _check_running(request: Request, block_size: int, prefilling: bool, decoding: bool) -> None:
    num_computed, num_known = request.num_computed_tokens, len(request.token_ids)
    assert num_computed <= len(request.blocks) * block_size, request
    assert request.num_hashed_blocks <= num_computed // block_size, request
    assert not (prefilling and decoding), request
    if prefilling:
        assert num_computed < num_known, request
    else:
        assert num_known <= num_computed + 1, request
    if decoding:
        assert num_computed <= request.last_position, request
        assert num_computed <= request.next_edge <= len(request.blocks) * block_size, request
    assert num_known <= max(request.last_position + 1, request.num_prompt_tokens), request
