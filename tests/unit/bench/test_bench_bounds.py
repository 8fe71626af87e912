import pytest

from bench.bounds import allowed
from bench.line import HEAD_PARAMETERS, LAYER_PARAMETERS, PRECISIONS

RATES = {"read_memory": 40e9, "fp32_avx512": 450e9, "bf16_avx512": 240e9, "int8_avx512": 1.9e12, "bf16_amx": 7e12}
RATES |= {"fp32_avx2": 180e9, "int8_avx2": 360e9}
PARAMETERS = LAYER_PARAMETERS + HEAD_PARAMETERS


def test_one_stream_reads_the_weights() -> None:
    assert allowed(RATES, PRECISIONS["bf16"], "auto")["one_stream_tokens_per_second"] == pytest.approx(
        40e9 / (2 * PARAMETERS), abs=0.1
    )
    assert allowed(RATES, PRECISIONS["int8"], "auto")["one_stream_tokens_per_second"] == pytest.approx(
        40e9 / (PARAMETERS * 66 / 64), abs=0.1
    )


@pytest.mark.parametrize(
    ("precision", "isa", "rate"),
    [
        ("fp32", "auto", 450e9),
        ("bf16", "auto", 7e12),
        # Widened to float32 bfloat16 is multiplied faster here than by its own instruction.
        ("bf16", "avx512", 450e9),
        ("int8", "auto", 7e12),
        ("int4", "avx512", 1.9e12),
        ("bf16", "avx2", 180e9),
        ("int8", "avx2", 360e9),
    ],
)
def test_products_are_bound_by_the_fastest_instruction_that_may_be_used(precision: str, isa: str, rate: float) -> None:
    found = allowed(RATES, PRECISIONS[precision], isa)
    assert found["gigaops_per_second"] == rate / 1e9
    per_output = 2 * (2 * LAYER_PARAMETERS + HEAD_PARAMETERS)
    expected = min(rate / per_output, 32 * found["one_stream_tokens_per_second"])
    assert found["streams_32_tokens_per_second"] == pytest.approx(expected, rel=1e-3)


def test_without_rates_there_are_no_bounds() -> None:
    assert allowed({}, PRECISIONS["bf16"], "auto") == {}
