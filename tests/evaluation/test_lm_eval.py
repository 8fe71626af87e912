"""lm-eval's `local-completions` against the running line scores as its `hf` does on the same weights in fp32."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import oracle
from support.client import Client
from support.stack import Stack

from quartet.shared.model_files import resolve_model

HERE = Path(__file__).parent
# Of a sum of log-probabilities: fp32 sums in another order.
TOLERANCE = 1e-2


@pytest.fixture(scope="module")
def weights():
    return resolve_model("smollm2-135m-instruct").path


@pytest.fixture(scope="module")
def folder(weights, tmp_path_factory):
    """The GGUF's weights and tokenizer as transformers saves them."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("hf")
    oracle.smollm2(weights).save_pretrained(folder)
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(folder)
    return folder


@pytest.fixture
def address(tmp_path):
    stack = Stack(tmp_path, executor_dtype="float32", executor_max_model_len=2048, executor_num_blocks=1024).start()
    client = Client(stack.address)
    try:
        client.wait_ready(120)
        yield stack.http_address
    finally:
        client.close()
        stack.stop()


def evaluate(tmp_path, kind, **arguments):
    """The task's metrics, and for each item the scores of its choices."""
    out = tmp_path / kind
    given = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [sys.executable, "-m", "lm_eval", "--model", kind, "--model_args", given, "--tasks", "facts"]
    command += ["--include_path", str(HERE), "--output_path", str(out), "--log_samples", "--seed", "1"]
    environ = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(tmp_path / "cache"),
        "OPENAI_API_KEY": "none",
    }
    done = subprocess.run(command, cwd=HERE, env=environ, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (results,) = out.rglob("results_*.json")
    (samples,) = out.rglob("samples_facts_*.jsonl")
    items = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda item: item["doc_id"])
    scores = [[(float(score), str(greedy)) for score, greedy in item["filtered_resps"]] for item in items]
    metrics = json.loads(results.read_text())["results"]["facts"]
    return {name: value for name, value in metrics.items() if name.startswith("acc")}, scores


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_score_is_that_of_transformers(folder, address, tmp_path):
    pytest.importorskip("lm_eval")
    wanted, wanted_scores = evaluate(tmp_path, "hf", pretrained=folder, dtype="float32")
    metrics, scores = evaluate(
        tmp_path,
        "local-completions",
        model="smollm2-135m-instruct",
        base_url=f"http://{address}/v1/completions",
        tokenizer=folder,
        tokenizer_backend="huggingface",
        num_concurrent=4,
        max_length=2048,
    )
    assert metrics == wanted and 0.3 < metrics["acc,none"] < 1
    assert len(scores) == len(wanted_scores) == len((HERE / "facts.jsonl").read_text().splitlines())
    for mine, theirs in zip(scores, wanted_scores, strict=True):
        for (score, greedy), (wanted_score, wanted_greedy) in zip(mine, theirs, strict=True):
            assert score == pytest.approx(wanted_score, abs=TOLERANCE) and greedy == wanted_greedy
