"""Ratios, floors, and the counting of tokens in a peer's stream."""

import pytest

from bench.peers.comparison import figures, floors, ratios
from bench.peers.http import ProgressReader
from quartet.services.cli.bench.record import Record


def rounds(*values: float) -> list[dict[str, float]]:
    return [{"one_stream_tokens_per_second": value} for value in values]


def pair(peer: str, variant: str, precision: str, figure: str, ratio: float) -> dict[str, object]:
    found = {figure: {"of_medians": ratio}}
    return {"peer": peer, "variant": variant, "precision": precision, "ratios": found}


def floor_of(precision: str, figure: str, comparisons: list[dict[str, object]]) -> dict[str, object]:
    return next(f for f in floors(comparisons) if f["precision"] == precision and f["figure"] == figure)


def test_figures_hold_median_and_spread() -> None:
    assert figures(rounds(3, 1, 2))["one_stream_tokens_per_second"] == {"median": 2, "min": 1, "max": 3, "runs": 3}


def test_the_ratio_is_of_medians_and_its_spread_of_rounds_that_follow_each_other() -> None:
    # The machine slows down to a half in the last round, for both.
    found = ratios(rounds(120, 130, 60), rounds(100, 100, 50))["one_stream_tokens_per_second"]
    assert found == {"of_medians": 1.2, "min": 1.2, "max": 1.3}


def test_sides_with_other_numbers_of_rounds_are_refused() -> None:
    with pytest.raises(ValueError):
        ratios(rounds(1, 2), rounds(1))


@pytest.mark.parametrize(("ratio", "met", "goal_met"), [(1.199, False, False), (1.2, True, False), (1.5, True, True)])
def test_a_floor_is_met_at_its_ratio(ratio: float, met: bool, goal_met: bool) -> None:
    figure = "streams_32_tokens_per_second"
    found = floor_of("bf16", figure, [pair("vllm", "bf16", "bf16", figure, ratio)])
    assert (found["ratio"], found["met"], found["goal_met"]) == (ratio, met, goal_met)


def test_a_floor_counts_the_peers_best_variant() -> None:
    figure = "streams_32_tokens_per_second"
    slow = pair("openvino", "int8", "int8", figure, 1.6)
    fast = pair("openvino", "int8_f32", "int8", figure, 1.25)
    assert floor_of("int8", figure, [slow])["met"] is True
    assert floor_of("int8", figure, [slow, fast])["met"] is False


def test_a_floor_that_was_not_measured_is_neither_met_nor_missed() -> None:
    other = pair("llama_cpp", "q4_1", "int4", "one_stream_tokens_per_second", 0.1)
    skipped = {"peer": "llama_cpp", "variant": "q4_0", "precision": "int4", "skipped": "no compiler"}
    assert all(floor["met"] is None and floor["ratio"] is None for floor in floors([other, skipped]))


def test_tokens_are_counted_where_events_hold_none() -> None:
    # llama.cpp holds back the text of a token that ends within a character, and its event with it.
    record = Record(0.0, output_tokens=2)
    reader = ProgressReader(record, False)
    assert reader.take(b'{"content": "", "stop": false, "tokens_predicted": 4}') and record.output_tokens == 4
    assert not reader.take(b'{"content": "", "stop": true}') and record.output_tokens == 4
