from bench.report import precision_lines, table


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert list(table(["a", "load", "n"], [["1", "x", "1000"], ["32 sampled", "long one", "7"]])) == [
        "a           load         n",
        "1           x         1000",
        "32 sampled  long one     7",
    ]


def test_a_row_says_what_was_measured_and_nothing_of_what_was_not() -> None:
    load = {
        "load": "32 x 128 in, 128 out",
        "output_tokens_per_second": {"median": 800.0, "min": 790.0, "max": 810.0, "runs": 3},
        "time_to_first_token_mean": {"median": 0.6, "min": 0.6, "max": 0.6, "runs": 3},
        "step": {"mean_ms": 35.2, "forward": 0.8, "attention": 0.3, "products": 0.45, "logits": 0.1, "outside": 0.1},
        "share_of_bound": 0.18,
        "failed": 2,
    }
    text = "\n".join(precision_lines("bf16", {"loads": {"32": load}, "ready_seconds": [2.5]}))
    assert "32 x 128 in, 128 out (2 failed)" in text
    for part in ("800 (790-810)", "18.0 %", "600 ms", "35.20 ms", "45.0 %", "30.0 %", "ready after 2.5 s"):
        assert part in text
    assert "bounds" not in text and "memory" not in text and "at rest" not in text
