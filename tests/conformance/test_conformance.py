"""The conformance kit passes our services and names the rule that a broken one breaks."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from quartet.shared.conformance import wire
from quartet.shared.conformance.report import Report

BROKEN = Path(__file__).parent / "broken"
SERVICES = ("scheduler", "tokenizer", "executor")
# Rules that a service is only held to when it lets them be provoked.
MAY_BE_SKIPPED = {"result.failed-row"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama in fp32."""
    folder = tmp_path_factory.mktemp("model")
    vocab, hidden, inner, heads, layers = 512, 64, 128, 4, 2
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(0)

    def weight(*shape: int) -> Any:
        return draw.normal(0, 0.1, shape).astype(np.float32)

    tensors = {"model.embed_tokens.weight": weight(vocab, hidden), "lm_head.weight": weight(vocab, hidden)}
    tensors["model.norm.weight"] = np.ones(hidden, np.float32)
    for i in range(layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = np.ones(hidden, np.float32)
        for name in "qkvo":
            tensors[f"model.layers.{i}.self_attn.{name}_proj.weight"] = weight(hidden, hidden)
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            tensors[f"model.layers.{i}.mlp.{name}_proj.weight"] = weight(*shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def spawn_command(service: str, model: Path, fault: str = "") -> str:
    command = [sys.executable, "-m", f"quartet.services.{service}"]
    if fault:
        command = [sys.executable, str(BROKEN / f"{service}.py"), fault]
    if service == "executor":
        command += ["--model", str(model), "--num-threads", "1", "--num-blocks", "64", "--dtype", "float32"]
    return shlex.join(command)


def start_kit(service: str, spawn: str, *flags: str) -> subprocess.Popen[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("QUARTET_") or k == "QUARTET_CACHE_DIR"}
    return subprocess.Popen(
        [sys.executable, "-m", "quartet.services.cli", "conformance", service, "--json", "--spawn", spawn, *flags],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(kit: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    """The exit code and the state of each rule."""
    out, err = kit.communicate(timeout=240)
    assert out, err
    report = json.loads(out)
    return kit.returncode, {rule["rule"]: rule for rule in report["rules"]}


@pytest.fixture(scope="module")
def kits(model: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """The three runs over our services, which mostly wait, side by side."""
    running = {service: start_kit(service, spawn_command(service, model)) for service in SERVICES}
    yield running
    for kit in running.values():
        if kit.poll() is None:
            kit.terminate()
        kit.communicate()


@pytest.mark.parametrize("service", SERVICES)
def test_our_service_passes(service: str, kits: dict[str, subprocess.Popen[str]]) -> None:
    code, rules = outcome(kits[service])
    broken = {name: rule["failures"] for name, rule in rules.items() if rule["state"] == "fail"}
    assert not broken
    assert code == 0
    skipped = {name for name, rule in rules.items() if rule["state"] == "skip"}
    assert skipped <= MAY_BE_SKIPPED


# Of each service some that are quick to be found; all in the long run.
QUICK = {
    "scheduler": {
        "skips_a_step_id",
        "three_plans_in_flight",
        "reuses_a_row_early",
        "hands_out_block_0",
        "shares_blocks_by_position",
        "exceeds_the_budget",
        "loses_the_past",
        "ignores_offers",
    },
    "tokenizer": {"emits_half_characters", "loses_the_past"},
    "executor": {"offers_half_written_blocks"},
}


def faults() -> Iterator[Any]:
    for service in SERVICES:
        for fault, (scenario, rule) in runpy.run_path(str(BROKEN / f"{service}.py"))["FAULTS"].items():
            name = fault.__name__
            marks = [] if name in QUICK[service] else [pytest.mark.slow]
            yield pytest.param(service, name, scenario, rule, id=f"{service}-{name}", marks=marks)


@pytest.mark.parametrize(("service", "fault", "scenario", "rule"), faults())
def test_broken_service_is_found(service: str, fault: str, scenario: str, rule: str, model: Path) -> None:
    kit = start_kit(service, spawn_command(service, model, fault), "--only", scenario, "--timeout", "15")
    code, rules = outcome(kit)
    assert code == 1
    assert rules[rule]["state"] == "fail", {n: r["failures"] for n, r in rules.items() if r["failures"]}


def test_a_kit_that_was_stopped_itself_holds_it_against_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(wire.time, "monotonic", lambda: clock[0])
    loop = wire.Loop(Report({}))
    for pause, counted in ((0.3, 0.3), (90.0, wire.LONGEST_TURN), (0.0, 0.0), (0.2, 0.2)):
        before = loop.now()
        clock[0] += pause
        assert loop.now() - before == pytest.approx(counted)
    loop.close()


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quartet.services.cli", "conformance", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_wrong_usage_is_told() -> None:
    assert run_cli("scheduler").returncode == 2
    assert "--gateway-link" in run_cli("scheduler", "--gateway-link", "tcp://x").stderr
    assert "no scenario is named nonsense" in run_cli("executor", "--only", "nonsense").stderr


def test_scenarios_are_listed() -> None:
    listed = run_cli("tokenizer", "--list")
    assert listed.returncode == 0 and "stop_strings" in listed.stdout
