"""Plans are small deltas; rows, columns and the decode bit set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quartet.services.scheduler.plan import pack_u16, pack_u32, unpack_u16, unpack_u32
from quartet.services.scheduler.request import Owner, Request, RequestGroup
from quartet.services.scheduler.rows import Rows
from quartet.shared.messages import ChoicePast, NewRequest, decode, encode
from quartet.shared.sampling_params import SamplingParams

MakeSim = Callable[..., Any]


def a_request(request_id: int = 1) -> Request:
    message = NewRequest(request_id, 1, [5], SamplingParams(max_tokens=4), [2], [ChoicePast(0)])
    return Request(RequestGroup(message, Owner("o"), request_id, 0.0), message.choices[0])


def test_columns_are_little_endian() -> None:
    assert pack_u16([1, 0x203]) == b"\1\0\3\2" and unpack_u16(b"\1\0\3\2") == [1, 0x203]
    assert pack_u32([0x1020304]) == b"\4\3\2\1" and unpack_u32(b"\4\3\2\1") == [0x1020304]
    with pytest.raises(ValueError):
        unpack_u32(b"\1\2\3")


def test_decodes_are_listed_by_rising_row() -> None:
    rows = Rows(12)
    requests = [a_request(i) for i in range(12)]
    for request in requests:
        rows.enter(request)
    for i in (11, 3, 8):
        rows.start_decoding(requests[i])
    assert rows.decodes() == [requests[3], requests[8], requests[11]]
    assert rows.decode_bits() == bytes([0b1000, 0b1001])
    rows.leave(requests[11])
    rows.stop_decoding(requests[8])
    assert rows.decodes() == [requests[3]] and rows.decode_bits() == b"\x08"


def test_a_row_is_reused_after_its_removal_has_returned() -> None:
    rows = Rows(1)
    first, second = a_request(1), a_request(2)
    rows.enter(first)
    rows.leave(first)
    assert (rows.num_free, rows.num_left) == (0, 1)
    leaving = rows.take_left()
    assert leaving == [0] and rows.num_free == 0
    rows.release(leaving)
    rows.enter(second)
    assert second.req_index == 0


def test_a_steady_decode_costs_only_its_bit_and_its_new_blocks(make_sim: MakeSim) -> None:
    model = {
        "max_num_seqs": 256,
        "block_size": 16,
        "num_blocks": 4096,
        "max_model_len": 4096,
        "max_num_batched_tokens": 1 << 16,
    }
    sim = make_sim(model=model)
    for i in range(256):
        sim.ask([5 + i] * (20 + i % 16), max_tokens=100)
    for _ in range(4):
        sim.schedule()
        sim.step()
    sizes = []
    for _ in range(16):
        sim.schedule()
        plan = sim.executor.queue[-1]
        assert decode(encode(plan)) == plan and not plan.new_rows and not plan.prefill_rows
        assert len(plan.decode_rows) == 32 and len(plan.block_rows) == 2 * 16
        sizes.append(len(encode(plan)))
        sim.step()
    assert sum(sizes) / len(sizes) <= 500


def test_only_rows_that_queued_requests_wait_for_are_removed_by_an_empty_plan(make_sim: MakeSim) -> None:
    sim = make_sim(model={"max_num_seqs": 2})
    sim.ask([5], max_tokens=1)
    sim.ask([6], max_tokens=1)
    sim.run()
    assert sim.core.state.rows.num_left == 2 and not sim.executor.queue
    sim.ask([7], max_tokens=1)
    sim.schedule()
    (plan,) = sim.executor.queue
    assert unpack_u16(plan.removed) == [0, 1] and not plan.new_rows
    sim.run()
    assert all(asked.done for asked in sim.asked.values())
