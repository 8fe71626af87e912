"""The whole executor on Triton's kernels, under the scheduler's core, against the plain one."""

import random

import numpy as np
import pytest
import torch
from support.engine import Line
from support.tiny_config import CONFIGS, random_parameters

from quartet.services.executor.attention.torch_paged import TorchPagedAttention
from quartet.services.executor.engine import TorchEngine
from quartet.services.executor.input_batch import InputBatch
from quartet.services.executor.kv_cache import KVCache
from quartet.services.executor.model_runner import ModelRunner
from quartet.services.executor.models.config import ModelConfig
from quartet.services.executor.models.decoder import Decoder
from quartet.services.executor.triton import staging
from quartet.services.executor.triton.backend import TritonAttention
from quartet.services.executor.triton.decoder import TritonDecoder
from quartet.services.executor.triton.device_engine import DeviceEngine
from quartet.services.executor.triton.kv_cache import TritonKVCache

torch.set_num_threads(1)

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, MAX_NUM_SEQS = 16, 24, 6


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is launched before the tokens of the one before are known."""
    monkeypatch.setattr(staging._HostDownload, "is_ready", False)


def input_batch(config: ModelConfig) -> InputBatch:
    return InputBatch(
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=64,
        max_num_batched_tokens=24,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        vocab_size=config.vocab_size,
    )


def plain_line(config: ModelConfig) -> Line:
    batch = input_batch(config)
    decoder = Decoder(config, random_parameters(config, torch.float32).__getitem__)
    cache = KVCache(config, NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU)
    return Line(ModelRunner(TorchEngine(decoder, cache, TorchPagedAttention(), batch, CPU), batch), batch)


def triton_line(config: ModelConfig, graphs: bool = False, kv_dtype: torch.dtype = torch.float32) -> Line:
    batch = input_batch(config)
    decoder = TritonDecoder(config, random_parameters(config, torch.float32).__getitem__)
    cache = TritonKVCache(config, NUM_BLOCKS, BLOCK_SIZE, kv_dtype, CPU)
    if kv_dtype == torch.float32:
        for tensor in (*cache.keys, *cache.values):
            tensor.fill_(float("nan"))
    attention = TritonAttention(config, kv_dtype, MAX_NUM_SEQS, CPU)
    engine = DeviceEngine(decoder, cache, attention, batch, CPU)
    # What the table holds beyond a row's blocks is anything.
    engine._block_tables.fill_(NUM_BLOCKS)
    if graphs:
        engine.capture_graphs(max_seconds=1e9, max_bytes=1)
    return Line(ModelRunner(engine, batch), batch)


def answers(line: Line, num_requests: int, max_tokens: int, **sampling: object) -> dict[tuple[int, int], list[int]]:
    rng = random.Random(5)
    for length in [17, 1, 16, 33, 15, 20, 2][:num_requests]:
        line.add([rng.randrange(101) for _ in range(length)], max_tokens, **sampling)
    line.run()
    assert not line.failed and not line.executor.in_flight
    return line.outputs


@pytest.mark.parametrize("is_ready", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["ahead", "one by one"])
def test_greedy_tokens_are_those_of_the_plain_executor(monkeypatch: pytest.MonkeyPatch, is_ready: bool) -> None:
    monkeypatch.setattr(staging._HostDownload, "is_ready", is_ready)
    config = CONFIGS["llama"]
    # More requests than rows: a row is used again, while a step that knew its last occupant is computed.
    assert answers(triton_line(config), 7, 5) == answers(plain_line(config), 7, 5)


@pytest.mark.usefixtures("ahead")
def test_decodes_as_graphs() -> None:
    config = CONFIGS["mistral"]
    line = triton_line(config, graphs=True)
    replayed = []
    graphs = line.executor._runner._engine._graphs
    replay = graphs.replay
    graphs.replay = lambda size: (replayed.append(size), replay(size))
    assert answers(line, 3, 4) == answers(plain_line(config), 3, 4)
    # Three rows run as four.
    assert 4 in replayed and set(replayed) <= {1, 2, 4, 6}


@pytest.mark.usefixtures("ahead")
def test_sampling_state_follows_the_rows() -> None:
    """Penalties, bias and min_tokens step by step, on rows that are used again."""
    config = CONFIGS["llama"]
    sampling = {
        "repetition_penalty": 1.7,
        "frequency_penalty": 0.5,
        "logit_bias": {3: 4.0},
        "min_tokens": 3,
        "stop_token_ids": list(range(50)),
        "logprobs": 2,
    }
    assert answers(triton_line(config), 7, 4, **sampling) == answers(plain_line(config), 7, 4, **sampling)


@pytest.mark.usefixtures("ahead")
def test_a_seed_s_tokens_do_not_depend_on_the_batch() -> None:
    config = CONFIGS["llama"]
    sampling = {"temperature": 0.8, "top_p": 0.9, "top_k": 30}
    together = triton_line(config)
    rng = random.Random(6)
    prompts = [[rng.randrange(101) for _ in range(9 + 7 * i)] for i in range(3)]
    for i, prompt in enumerate(prompts):
        together.add(prompt, 4, seed=i, **sampling)
    together.run()
    alone = triton_line(config, graphs=True)
    alone.add(prompts[2], 4, seed=2, **sampling)
    alone.run()
    assert alone.outputs[1, 0] == together.outputs[3, 0]


@pytest.mark.usefixtures("ahead")
@pytest.mark.filterwarnings("ignore:invalid value")
def test_prompt_logprobs_and_a_row_that_fails(plans) -> None:
    config = CONFIGS["llama"]
    lines = triton_line(config), plain_line(config)
    for line in lines:
        line.add(list(range(30)), 2, prompt_logprobs=1)
        line.run()
    got, expected = (line.prompt_logprobs[1] for line in lines)
    assert [entry.token_id for entry in got[1:]] == list(range(1, 30))
    assert np.allclose([e.logprob for e in got[1:]], [e.logprob for e in expected[1:]], atol=1e-3)

    runner = lines[0].executor._runner
    runner.reset()
    for cache in runner._engine._kv_cache.values:
        cache[3] = float("nan")
    new = [plans.new_row(0, [1, 2, 3], [1]), plans.new_row(1, list(range(18)), [3, 4], num_computed=16)]
    steps = [
        runner.launch(plans.plan(0, new=new, prefill=[(0, 3), (1, 2)])),
        runner.launch(plans.plan(1, decode=[0, 1])),
    ]
    first, second = (step.result() for step in steps)
    assert [index for index, _ in first.errors] == [1] and [index for index, _ in second.errors] == [1]
    assert "earlier step" in second.errors[0][1] or "not finite" in second.errors[0][1]


def test_warm_up() -> None:
    line = triton_line(CONFIGS["llama"])
    line.executor._runner.warm_up()
    assert line.executor._runner.offers() == (b"", b"")


def test_an_eight_bit_cache_answers_nearly_the_same() -> None:
    config = CONFIGS["llama"]
    got = answers(triton_line(config, kv_dtype=torch.float8_e4m3fn), 3, 1)
    expected = answers(plain_line(config), 3, 1)
    assert sum(got[key] == expected[key] for key in expected) >= 2
