"""Figures of a load against numpy, on series that are known."""

import numpy as np
import pytest

from quartet.services.cli.bench.metrics import errors, meets, parse_slo, percentile, spread, summary
from quartet.services.cli.bench.record import Record


def record(started, times, tokens=None, **fields):
    tokens = len(times) if tokens is None else tokens
    return Record(started, times, tokens, ended=times[-1] if times else started, **fields)


@pytest.mark.parametrize("size", [1, 2, 3, 10, 101, 1000])
def test_spread_is_numpys(size):
    values = np.random.default_rng(size).lognormal(-3, 1, size)
    found = spread("ttft", list(values))
    expected = {
        "mean_ttft_ms": values.mean(),
        "median_ttft_ms": np.median(values),
        "std_ttft_ms": values.std(),
        "p90_ttft_ms": np.percentile(values, 90),
        "p99_ttft_ms": np.percentile(values, 99),
        "max_ttft_ms": values.max(),
    }
    assert found == pytest.approx({name: 1e3 * value for name, value in expected.items()}, abs=6e-4)


@pytest.mark.parametrize("percent", [0, 12.5, 50, 99, 100])
def test_percentiles_are_numpys(percent):
    values = sorted(np.random.default_rng(7).normal(size=37))
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_nothing_is_said_of_no_values():
    assert spread("itl", []) == {}
    found = summary([], 1.0)
    assert found["completed"] == found["failed"] == found["output_throughput"] == 0
    assert "mean_ttft_ms" not in found


def test_a_run():
    records = [
        record(0.0, [1.0, 1.5, 2.5], prompt_tokens=10, cached_tokens=4),
        record(1.0, [1.2, 1.3], tokens=5, prompt_tokens=20),
        record(2.0, [2.5], error="HTTP 429", message="too many"),
    ]
    found = summary(records, 4.0)
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_cached_tokens"], found["total_output_tokens"]) == (30, 4, 8)
    assert found["request_throughput"] == 0.5
    assert found["output_throughput"] == 2.0
    assert found["total_token_throughput"] == 9.5
    assert found["max_concurrent_requests"] == 2
    assert found["mean_ttft_ms"] == 600.0
    # (2.5 - 1.0) / 2 and (1.3 - 1.2) / 4: the last chunk had four tokens.
    assert found["mean_tpot_ms"] == pytest.approx((750 + 25) / 2)
    assert found["mean_itl_ms"] == pytest.approx((500 + 1000 + 100) / 3, abs=1e-3)
    assert found["max_e2el_ms"] == 2500.0
    assert found["errors"] == {"HTTP 429": {"count": 1, "example": "too many"}}
    assert "request_goodput" not in found


def test_a_single_token_has_no_time_per_output_token():
    found = summary([record(0.0, [0.5])], 1.0)
    assert found["mean_ttft_ms"] == 500.0
    assert not any("tpot" in name or "itl" in name for name in found)


def test_goodput_counts_requests_that_meet_all_goals():
    fast, slow_start, slow_tokens = record(0, [0.4, 0.44]), record(0, [0.6, 0.61]), record(0, [0.1, 0.2])
    slo = parse_slo("ttft:500,itl:50")
    assert [meets(r, slo) for r in (fast, slow_start, slow_tokens)] == [True, False, False]
    found = summary([fast, slow_start, slow_tokens], 2.0, slo)
    assert (found["request_goodput"], found["goodput_completed"], found["slo_ms"]) == (0.5, 1, slo)
    assert meets(fast, {"e2el": 440.1}) and not meets(fast, {"e2el": 439.9})
    assert meets(fast, {"tpot": 41}) and not meets(fast, {"tpot": 39})


@pytest.mark.parametrize("text", ["", "ttft", "ttft:x", "ttft:0", "ttft:-1", "ttft:inf", "first:5", "ttft:nan"])
def test_a_goal_that_is_none_is_refused(text):
    with pytest.raises(ValueError):
        parse_slo(text)


def test_goals_may_be_apart():
    assert parse_slo("ttft:500 tpot:50,e2el:9e3") == {"ttft": 500, "tpot": 50, "e2el": 9000}


def test_errors_by_kind_most_first():
    records = [record(0, [], error=kind, message=str(i)) for i, kind in enumerate("abb")]
    assert list(errors(records).items()) == [
        ("b", {"count": 2, "example": "1"}),
        ("a", {"count": 1, "example": "0"}),
    ]


def test_a_stream_that_ends_as_another_begins_is_not_beside_it():
    assert summary([record(0, [1.0]), record(1.0, [2.0])], 2)["max_concurrent_requests"] == 1
    assert summary([record(0, [1.5]), record(1.0, [2.0])], 2)["max_concurrent_requests"] == 2
