import math
from pathlib import Path

import pytest
import torch
from support.tiny_model import make_tiny_llama

from bench.perplexity import Dequantised, report, score
from quartet.services.executor.weights import load_decoder

torch.set_num_threads(1)


@pytest.mark.parametrize("budget", [1, 24, 64])
def test_the_score_is_transformers_whatever_the_steps(tmp_path: Path, budget: int) -> None:
    model = make_tiny_llama(tmp_path)
    ids = torch.randint(0, 256, (100,)).tolist()
    with torch.inference_mode():
        windows = [torch.tensor(part) for part in (ids[:48], ids[48:96], ids[96:])]
        losses = [
            -torch.log_softmax(model(window[None]).logits[0, :-1], -1).gather(1, window[1:, None]) for window in windows
        ]
    expected = float(torch.cat(losses).mean())
    assert score(load_decoder(tmp_path, "float32"), ids, 48, budget) == pytest.approx(expected, rel=1e-4)


def test_only_the_layers_matrices_go_through_four_bits() -> None:
    weight = torch.randn(4, 64)
    parameters: object = lambda name: weight  # noqa: E731
    dequantised = Dequantised(parameters)  # type: ignore[arg-type]
    assert torch.equal(dequantised("model.embed_tokens.weight"), weight)
    found = dequantised("model.layers.0.mlp.up_proj.weight")
    for row in range(4):
        for begin in (0, 32):
            assert len(found[row, begin : begin + 32].unique()) <= 16
    # Half a step of each group's sixteen.
    groups = weight.view(4, 2, 32)
    half = (groups.amax(-1) - groups.amin(-1)) / 30
    assert ((found - weight).view(4, 2, 32).abs() <= half[..., None] * 1.02).all()


def test_ratios() -> None:
    found = report({"bf16": 20.0, "int8": 20.1, "int4": 21.0, "int4 dequantised": 20.9}, 100, 256)
    assert found["ratios"]["int8 / bf16"] == pytest.approx(1.005)
    assert found["ratios"]["int4 / int4 dequantised"] == pytest.approx(21 / 20.9, abs=1e-5)
    assert math.isclose(found["perplexity"]["bf16"], 20.0)
