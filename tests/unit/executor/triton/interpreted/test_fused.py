import itertools

import pytest
import torch
import torch.nn.functional as F

from quartet.services.executor.models.rope import RopeConfig, RotaryEmbedding
from quartet.services.executor.triton.fused import add_rms_norm, rope_and_write, silu_mul

torch.set_num_threads(1)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Of the largest value, for the result's own rounding: the interpreter cuts off bits where a GPU rounds.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-20}
EPS = 1e-5


def assert_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert got.double().isfinite().all()
    error = (got.double() - expected).abs().max() / expected.abs().max()
    assert error < tolerance


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.empty gives holds NaN, so that a place that a kernel leaves out shows."""

    def poisoned(make):
        return lambda *args, **kwargs: make(*args, **kwargs).fill_(float("nan"))

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 576), (3, 2048), (2, 80), (0, 576), (17, 96)])
def test_norm_of_the_sum(shape: tuple[int, int], dtype: torch.dtype) -> None:
    residual, addend = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.rand(shape[1]).to(dtype)
    total = residual + addend
    out = add_rms_norm(residual, addend, weight, EPS)
    if shape[0]:
        assert_close(residual, total.double(), TOLERANCE[dtype])
        assert_close(out, normed(residual, weight), TOLERANCE[dtype])


@pytest.mark.usefixtures("poison")
def test_norm_alone_leaves_its_input() -> None:
    residual, weight = torch.randn(4, 576), torch.rand(576)
    before = residual.clone()
    assert_close(add_rms_norm(residual, None, weight, EPS), normed(before, weight), 2**-20)
    assert torch.equal(residual, before)


def test_norm_keeps_a_nan_to_its_row() -> None:
    residual = torch.randn(3, 100)
    residual[1, 99] = float("nan")
    out = add_rms_norm(residual, None, torch.ones(100), EPS)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 1536), (2, 1025), (0, 8)])
def test_gate(shape: tuple[int, int], dtype: torch.dtype) -> None:
    num_tokens, width = shape
    gate_up = torch.randn(num_tokens, 2 * width).mul(3).to(dtype)
    out = silu_mul(gate_up)
    gate, up = gate_up.double().chunk(2, -1)
    assert out.shape == shape
    if num_tokens:
        assert_close(out, F.silu(gate) * up, TOLERANCE[dtype])


HEADS = [(4, 2, 64), (9, 3, 80), (20, 10, 96), (8, 1, 128), (2, 2, 256), (1, 1, 2)]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("heads", "has_norm"), itertools.product(HEADS, [False, True]))
def test_rotation_and_write(heads: tuple[int, int, int], has_norm: bool) -> None:
    num_heads, num_kv_heads, head_size = heads
    dtype, num_tokens, num_blocks, block_size = torch.bfloat16, 7, 4, 16
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_size).to(dtype)
    positions = torch.tensor([0, 1, 15, 16, 17, 4095, 100_000])
    cos, sin = RotaryEmbedding(RopeConfig(theta=1e4), head_size, torch.device("cpu"))(positions)
    slots = torch.tensor([16, 63, 17, -1, 40, 15, 31])
    keys, values = torch.full((2, num_blocks, block_size, num_kv_heads, head_size), float("nan")).to(dtype)
    norms = (torch.rand(head_size).to(dtype), torch.rand(head_size).to(dtype)) if has_norm else None

    ones = torch.ones(num_kv_heads)
    query = rope_and_write(qkv, cos, sin, slots, keys, values, norms, EPS, ones, ones)

    q, k, v = (
        part.unflatten(1, (-1, head_size)).double()
        for part in qkv.split([num_heads * head_size, num_kv_heads * head_size, num_kv_heads * head_size], 1)
    )
    if norms is not None:
        q, k = normed(q, norms[0]), normed(k, norms[1])

    def rotated(x: torch.Tensor) -> torch.Tensor:
        return x * cos.double() + x.roll(head_size // 2, -1) * sin.double()

    assert_close(query, rotated(q), TOLERANCE[dtype])
    written = slots >= block_size
    flat_keys, flat_values = keys.flatten(0, 1), values.flatten(0, 1)
    assert_close(flat_keys[slots[written]], rotated(k)[written], TOLERANCE[dtype])
    assert torch.equal(flat_values[slots[written]].double(), v[written])
    rest = torch.ones(num_blocks * block_size, dtype=torch.bool)
    rest[slots[written]] = False
    assert flat_keys[rest].isnan().all() and flat_values[rest].isnan().all()


def test_eight_bit_cache_is_scaled_and_saturates() -> None:
    num_kv_heads, head_size = 3, 64
    # Values that need no rounding: the interpreter's is not a GPU's.
    qkv = torch.randn(2, (1 + num_kv_heads + num_kv_heads) * head_size).to(torch.float8_e4m3fn).float()
    qkv[1] *= 256
    cos, sin = RotaryEmbedding(RopeConfig(theta=1e4), head_size, torch.device("cpu"))(torch.tensor([0, 0]))
    keys, values = torch.zeros(2, 2, 16, num_kv_heads, head_size).to(torch.float8_e4m3fn)
    key_scales, value_scales = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([4.0, 0.25, 1.0])
    rope_and_write(qkv, cos, sin, torch.tensor([19, 20]), keys, values, None, EPS, key_scales, value_scales)

    heads = qkv.view(2, -1, head_size)[:, 1:]
    key, value = heads[:, :num_kv_heads], heads[:, num_kv_heads:]
    for cache, x, scales in ((keys, key, key_scales), (values, value, value_scales)):
        expected = (x / scales[:, None]).clamp(-448, 448)
        got = cache[1, 3:5].float()
        sub_normal = expected.abs() < 2**-6
        assert torch.equal(got[~sub_normal], expected[~sub_normal])
        assert (got[1].abs() == 448).any()
