"""The compiled matrix products against float64."""

from __future__ import annotations

import random

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from support.kernels import KINDS_OF_PRODUCTS

from quartet.services.executor.native.library import Format, Isa, detect_isa, load_library

NAN = float("nan")


@pytest.fixture(params=KINDS_OF_PRODUCTS, ids=lambda kind: kind.describe())
def isa(request: pytest.FixtureRequest) -> Isa:
    kind: Isa = request.param
    return kind


def product(isa: Isa, format: Format, weight: torch.Tensor, num_columns: int, x: torch.Tensor) -> torch.Tensor:
    """weight as the format's source has it, x [M, K] bfloat16 -> [M, num_columns] float32."""
    library = load_library()
    assert library is not None
    num_rows, num_inner = x.shape
    # Padded all round, so that a write outside shows.
    padded = torch.full((num_rows + 2, num_columns), NAN)
    out = padded[1:-1]
    assert library.quartet_multiply(
        int(isa), int(format), num_columns, num_inner, weight.data_ptr(), num_rows, x.data_ptr(), out.data_ptr()
    )
    assert padded[0].isnan().all() and padded[-1].isnan().all()
    return out


def multiply(isa: Isa, format: Format, weight: torch.Tensor, num_columns: int, x: torch.Tensor) -> torch.Tensor:
    """As product, in float64, where nothing is broken."""
    out = product(isa, format, weight, num_columns, x)
    assert not out.isnan().any()
    return out.double()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a share of the result's root mean square."""
    return float((found - expected).abs().max() / expected.square().mean().sqrt())


def random_shapes(seed: int, inner: list[int]) -> list[tuple[int, int, int]]:
    rng = random.Random(seed)
    rows = [1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 16, 17, 31, 32, 33, 64, 65, 70]
    return [(m, rng.choice([1, 15, 16, 17, 31, 32, 33, 96, 200]), rng.choice(inner)) for m in rows]


@pytest.mark.parametrize("seed", range(4))
def test_bf16(isa: Isa, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for num_rows, num_columns, num_inner in random_shapes(seed, [1, 7, 32, 50, 64, 100, 576]):
        weight = torch.randn(num_columns, num_inner, generator=generator).bfloat16()
        x = torch.randn(num_rows, num_inner, generator=generator).bfloat16()
        found = multiply(isa, Format.BF16, weight, num_columns, x)
        expected = x.double() @ weight.double().T
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def in_groups(matrix: torch.Tensor, group: int) -> torch.Tensor:
    """[N, K] -> float32 [N, ceil(K / group), group], padded with zeros."""
    return torch.nn.functional.pad(matrix.float(), (0, -matrix.shape[1] % group)).view(len(matrix), -1, group)


def bf16_above(x: torch.Tensor) -> torch.Tensor:
    return ((x.view(torch.int32) + 0xFFFF) >> 16 << 16).view(torch.float32)


def rounded_rows(x: torch.Tensor, group: int) -> torch.Tensor:
    """To 8 bits of each group's largest value; float64."""
    groups = in_groups(x, group)
    most = groups.abs().amax(-1, keepdim=True)
    units = (groups * torch.where(most > 0, torch.full_like(most, 127) / most, 0)).round()
    return (units.double() * (most / 127)).flatten(1)[:, : x.shape[1]]


def rounded_weights(weight: torch.Tensor) -> torch.Tensor:
    """8 bits and a bfloat16 scale, rounded up, per 64 of a row; float64."""
    groups = in_groups(weight, 64)
    scale = bf16_above(groups.abs().amax(-1, keepdim=True) / 127)
    units = (groups * torch.where(scale > 0, 1 / scale, 0)).round()
    return (units.double() * scale).flatten(1)[:, : weight.shape[1]]


def four_bits_in_eight(blocks: torch.Tensor, num_inner: int) -> torch.Tensor:
    """Q4_1 rows as tiles multiply them: 8 bits and a bfloat16 scale, rounded up, per two blocks; float64 [N, K]."""
    parts = torch.nn.functional.pad(blocks.view(len(blocks), -1, 20), (0, 0, 0, -(num_inner // 32) % 2))
    scale, minimum = parts[..., :4].contiguous().view(torch.float16).float().unsqueeze(-1).unbind(-2)
    units = torch.cat([parts[..., 4:] & 15, parts[..., 4:] >> 4], -1).int()
    last = (scale.double() * 15 + minimum).float()
    most = torch.maximum(minimum.abs(), last.abs()).view(len(blocks), -1, 2).amax(-1)
    unit = bf16_above(most * torch.tensor(1 / 127, dtype=torch.float32)).repeat_interleave(2, 1)[..., None]
    inverse = torch.where(unit > 0, 1 / unit, 0)
    step, first = (scale * inverse * 256).round().int(), (minimum * inverse * 256).round().int() + 128
    return (((units * step + first) >> 8).double() * unit).flatten(1)[:, :num_inner]


@pytest.mark.parametrize("seed", range(4))
def test_int8(isa: Isa, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for num_rows, num_columns, num_inner in random_shapes(seed, [7, 32, 50, 64, 100, 576]):
        weight = torch.randn(num_columns, num_inner, generator=generator).bfloat16()
        x = torch.randn(num_rows, num_inner, generator=generator).bfloat16()
        found = multiply(isa, Format.INT8, weight, num_columns, x)
        if isa & Isa.AMX and num_rows > 64:
            # Many rows stay bfloat16 and the weights become it, those half way between two units either of them.
            assert error(found, x.double() @ rounded_weights(weight).T) < 0.02
        else:
            group = 64 if isa & Isa.AMX and num_rows > 6 else 32
            assert error(found, rounded_rows(x, group) @ rounded_weights(weight).T) < 1e-4
        assert error(found, x.double() @ weight.double().T) < 0.1


@pytest.mark.parametrize("seed", range(4))
def test_int4(isa: Isa, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for num_rows, num_columns, num_inner in random_shapes(seed, [32, 64, 96, 576]):
        floats = torch.randn(num_columns, num_inner, generator=generator)
        blocks = quants.quantize(floats.numpy(), GGMLQuantizationType.Q4_1)
        dequantized = torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType.Q4_1)).double()
        x = torch.randn(num_rows, num_inner, generator=generator).bfloat16()
        found = multiply(isa, Format.INT4, torch.from_numpy(blocks), num_columns, x)
        if isa & Isa.AMX and num_rows > 64:
            # The weights are rounded to bfloat16.
            assert error(found, x.double() @ dequantized.T) < 0.01
        elif isa & Isa.AMX and num_rows > 11:
            expected = four_bits_in_eight(torch.from_numpy(blocks), num_inner)
            assert error(found, rounded_rows(x, 64) @ expected.T) < 1e-4
        else:
            assert error(found, rounded_rows(x, 32) @ dequantized.T) < 1e-4
        assert error(found, x.double() @ dequantized.T) < 0.04


def source(format: Format, num_columns: int, num_inner: int) -> torch.Tensor:
    weight = torch.randn(num_columns, num_inner, generator=torch.Generator().manual_seed(0))
    if format is not Format.INT4:
        return weight.bfloat16()
    return torch.from_numpy(quants.quantize(weight.numpy(), GGMLQuantizationType.Q4_1))


@pytest.mark.parametrize("format", list(Format))
@pytest.mark.parametrize("num_rows", [1, 5, 20, 70])
def test_what_is_not_finite_stays_so_in_its_row(isa: Isa, format: Format, num_rows: int) -> None:
    weight = source(format, 48, 64)
    for bad in (NAN, float("inf")):
        x = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        x[num_rows // 2, 40] = bad
        finite = product(isa, format, weight, 48, x).isfinite().all(-1)
        assert finite.sum() == num_rows - 1 and not finite[num_rows // 2]


@pytest.mark.parametrize("format", list(Format))
@pytest.mark.parametrize("num_rows", [1, 5, 20, 70])
def test_large_rows_and_rows_of_zeros(isa: Isa, format: Format, num_rows: int) -> None:
    weight = source(format, 48, 64)
    x = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = multiply(isa, format, weight, 48, x)
    assert torch.equal(multiply(isa, format, weight, 48, x * 0), torch.zeros(num_rows, 48, dtype=torch.float64))
    torch.testing.assert_close(multiply(isa, format, weight, 48, x * 2.0**120) / 2.0**120, found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bad", [0x7E00, 0x7FFF, 0x7C00])
@pytest.mark.parametrize("place", [0, 1, 10, 11])
@pytest.mark.parametrize("num_rows", [1, 20, 70])
def test_four_bits_with_a_broken_scale_or_minimum_are_not_finite(isa: Isa, num_rows: int, place: int, bad: int) -> None:
    """NaN or infinity in column 3: the scale or the minimum of its first or its second block."""
    blocks = source(Format.INT4, 48, 64)
    blocks[3].view(torch.int16)[place] = bad
    x = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    finite = product(isa, Format.INT4, blocks, 48, x).isfinite()
    assert not finite[:, 3].any() and finite[:, :3].all() and finite[:, 4:].all()


@pytest.mark.parametrize("format", [Format.BF16, Format.INT8])
def test_a_row_s_product_is_the_same_whatever_is_beside_it(format: Format) -> None:
    """On AVX2, whose batches and single rows are summed in one order."""
    if not detect_isa() & Isa.AVX2:
        pytest.skip("no compiled kernels for AVX2 here")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 96, generator=generator).bfloat16()
    x = torch.randn(33, 96, generator=generator).bfloat16()
    together = multiply(Isa.AVX2, format, weight, 200, x)
    for row in range(33):
        assert torch.equal(multiply(Isa.AVX2, format, weight, 200, x[row : row + 1].contiguous())[0], together[row])
