"""Tool calls in the record of a choice: borders, what is known already, gaps, and what is submitted again."""

import pytest

from quartet.services.gateway.choice import Choice, Gap, Position
from quartet.shared.messages import ChoicePast, Delta, FinishReason
from quartet.shared.messages import ToolCallDelta as Part
from quartet.shared.tool_calls import after_call_bytes, joined, num_call_bytes

CALLS = [Part(0, "a", "f", '{"x": '), Part(0, arguments='"é"}'), Part(1, "b", "g"), Part(1, arguments="{}")]


def delta(start, token_ids, parts, total, **more):
    return Delta(1, 1, 0, start, token_ids, "", 0, tool_calls=parts, num_call_bytes=total, **more)


def test_the_length_of_calls_and_what_follows_it():
    assert num_call_bytes(CALLS) == 1 + 6 + 5 + 1 + 2
    assert joined(CALLS) == [Part(0, "a", "f", '{"x": "é"}'), Part(1, "b", "g", "{}")]
    for count in range(num_call_bytes(CALLS) + 1):
        rest = after_call_bytes(CALLS, count)
        if count != 9:  # within a character
            assert num_call_bytes(rest) == num_call_bytes(CALLS) - count
    assert after_call_bytes(CALLS, 1) == [Part(0, arguments='{"x": '), *CALLS[1:]]
    assert after_call_bytes(CALLS, 7) == CALLS[1:]


def test_a_slow_client_gets_one_part_of_each_call_and_a_past_counts_them():
    choice = Choice(0)
    choice.add(delta(0, [1], CALLS[:1], 7))
    choice.add(delta(1, [2], CALLS[1:3], 13))
    choice.add(delta(2, [3], CALLS[3:], 15, finish_reason=FinishReason.STOP))
    chunk, border = choice.chunk(0)
    assert chunk.tool_calls == joined(CALLS) and border == 3
    behind_the_first = choice.chunk(choice.find_border(Position(1)))[0]
    assert behind_the_first.tool_calls == [
        Part(0, arguments='"é"}'),
        *joined(CALLS[2:]),
    ]
    assert choice.past == ChoicePast(0, [1, 2, 3], 0, 15)
    assert choice.size() > 15


def test_what_is_known_already_is_left_out_and_what_is_missing_is_a_gap():
    choice = Choice(0, [1], 0, sent_call_bytes=7)
    with pytest.raises(Gap):
        choice.add(delta(1, [2], CALLS[2:3], 13))
    assert choice.add(delta(0, [1, 2], CALLS[:3], 13)) > 0
    assert choice.tool_calls == CALLS[1:3] and choice.num_call_bytes == 13
    assert choice.add(delta(0, [1, 2], CALLS[:3], 13)) == -1
    assert choice.num_call_bytes == 13
    with pytest.raises(Gap):
        choice.add(delta(2, [3], [Part(-1, "c", "h")], 14))


def test_where_the_calls_so_far_are_not_known_the_first_delta_tells():
    choice = Choice(0, [1], None, sent_call_bytes=None)
    choice.add(delta(1, [2], CALLS[1:2], 12))
    assert choice.past == ChoicePast(0, [1, 2], 0, 12) and choice.tool_calls == CALLS[1:2]
