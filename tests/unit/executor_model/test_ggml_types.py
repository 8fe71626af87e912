"""GGML's tensor types, against the gguf library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from quartet.services.executor.weights import ggml_types
from quartet.services.executor.weights.ggml_types import dequantize, find_type
from quartet.shared.model_files import cache_dir

SMOLLM2 = cache_dir() / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K"]


def random_rows(kind: gguf.GGMLQuantizationType, num_rows: int, num_columns: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    try:
        values = (rng.standard_normal((num_rows, num_columns)) * 3).astype(np.float32)
        return gguf.quants.quantize(values, kind).view(np.uint8)
    except NotImplementedError:  # it cannot write K types: any bytes whose fp16 scales are finite
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        return rng.integers(0, 0x3C, (num_rows, num_columns // block * block_bytes), np.uint8)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("slice_elements", [1, 3 * 512, 1 << 17])
def test_values_are_the_gguf_librarys(name: str, slice_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml_types, "_SLICE_ELEMENTS", slice_elements)
    number = gguf.GGMLQuantizationType[name]
    rows = random_rows(number, 7, 512)
    rows.flags.writeable = False
    expected = torch.from_numpy(np.array(gguf.quants.dequantize(rows, number)))
    kind = find_type(int(number))
    assert kind is not None
    assert (kind.name, kind.block, kind.block_bytes) == (name, *gguf.GGML_QUANT_SIZES[number])
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dequantize(kind, rows, dtype), expected.to(dtype))


def test_threads_are_as_they_were_also_after_an_error() -> None:
    kind = find_type(int(gguf.GGMLQuantizationType.Q8_0))
    assert kind is not None
    before = torch.get_num_threads()
    dequantize(kind, np.zeros((2, 34), np.uint8), torch.float32)
    with pytest.raises(RuntimeError):
        dequantize(kind, np.zeros((2, 35), np.uint8), torch.float32)
    assert torch.get_num_threads() == before


def test_one_row_of_one_dimension() -> None:
    values = torch.arange(5.0)
    rows = values.numpy().view(np.uint8)
    assert torch.equal(dequantize(ggml_types.F32, rows, torch.float32), values)


def test_types_without_a_decoder_and_unknown_ones() -> None:
    kind = find_type(int(gguf.GGMLQuantizationType.I8))
    assert kind is not None
    with pytest.raises(NotImplementedError):
        dequantize(kind, np.zeros((1, 4), np.uint8), torch.float32)
    assert find_type(9999) is None


@pytest.mark.skipif(not SMOLLM2.exists(), reason="the default model is not in the cache")
def test_the_default_model_is_loaded_without_the_gguf_library_and_little_memory_beside_it() -> None:
    """The library's decoder of Q8_0 left up to 90 MiB in the heap."""
    program = Path(__file__).with_name("load_and_tell.py").read_text()
    output = subprocess.run(
        [sys.executable, "-c", program, str(SMOLLM2)], check=True, capture_output=True, text=True
    ).stdout
    has_gguf, mebibytes = output.split()
    assert has_gguf == "False"
    assert float(mebibytes) < 40
