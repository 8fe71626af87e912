"""Texts and calls in a row, whatever of them comes in one chunk."""

from array import array

import pytest

from quartet.services.gateway.events import Chunk
from quartet.services.gateway.http.blocks import Blocks, Step
from quartet.shared.messages import FinishReason, ToolCallDelta


def chunk(text="", *calls, finish=None):
    return Chunk(0, 0, array("I", [1]), text, None, finish, None, list(calls))


FIRST = ToolCallDelta(0, "a", "f", '{"x"')
REST = ToolCallDelta(0, arguments=": 1}")
SECOND = ToolCallDelta(1, "b", "g", "{}")


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk("Hm."), chunk("", FIRST), chunk("", REST), chunk("", SECOND), chunk("\nSo.")],
        [chunk("Hm.\n", FIRST), chunk("", REST, SECOND), chunk("\nSo.")],
        [chunk("Hm. ", FIRST), chunk(" ", REST), chunk(" ", SECOND), chunk("\nSo.")],
    ],
)
def test_each_block_ends_before_the_next_begins(chunks):
    blocks = Blocks(may_call=True)
    changes = [change for part in chunks for change in blocks.add(part)]
    changes += blocks.add(chunk(finish=FinishReason.STOP))
    contents = [(block.call_id, block.content.strip()) for block in blocks.blocks]
    assert contents == [("", "Hm."), ("a", '{"x": 1}'), ("b", "{}"), ("", "So.")]
    assert blocks.called and all(block.ended for block in blocks.blocks)
    steps = [(change.block.index, change.step) for change in changes if change.step is not Step.GROW]
    assert steps == [(i, step) for i in range(4) for step in (Step.BEGIN, Step.END)]
    grown = [[c.piece for c in changes if c.step is Step.GROW and c.block is block] for block in blocks.blocks]
    assert ["".join(pieces) for pieces in grown] == [block.content for block in blocks.blocks]


def test_the_end_of_a_call_and_text_after_it_in_one_chunk():
    blocks = Blocks(may_call=True)
    for part in (chunk("", FIRST), chunk("So.", REST, finish=FinishReason.STOP)):
        blocks.add(part)
    assert [(block.call_id, block.content) for block in blocks.blocks] == [("a", '{"x": 1}'), ("", "So.")]
