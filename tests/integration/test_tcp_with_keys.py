"""The whole line over tcp with keys, each process with only the files that it needs."""

from __future__ import annotations

import shutil
from pathlib import Path

import grpc
import pytest
from support.client import Client
from support.stack import ROLES, Stack, eventually, free_port

from quartet.shared import curve

FILES = {
    "gateway": ("server.key_secret", "client.key"),
    "scheduler": ("server.key_secret", "client.key"),
    "tokenizer": ("client.key_secret", "server.key"),
    "executor": ("client.key_secret", "server.key"),
}


def test_the_line_runs_over_tcp_with_keys_and_a_stranger_gets_nothing(tmp_path: Path) -> None:
    curve.generate(str(tmp_path / "keys"))
    curve.generate(str(tmp_path / "stranger"))
    settings = {}
    for role in ROLES:
        folder = tmp_path / role
        folder.mkdir()
        for name in FILES[role]:
            shutil.copy2(tmp_path / "keys" / name, folder / name)
        settings[f"{role}_curve_keys"] = folder
    gateway, tokenizer, executor = (f"tcp://127.0.0.1:{free_port()}" for _ in range(3))
    settings |= {
        "gateway_tokenizer_link": gateway,
        "tokenizer_gateway_links": gateway,
        "tokenizer_scheduler_link": tokenizer,
        "scheduler_tokenizer_link": tokenizer,
        "scheduler_executor_link": executor,
        "executor_scheduler_link": executor,
    }
    stack = Stack(tmp_path, executor_num_blocks=64, executor_max_model_len=512, **settings)
    client = Client(stack.address)
    try:
        stack.start("gateway", "scheduler", "executor")
        # A tokenizer that knows the address and has keys of its own making.
        shutil.copy2(tmp_path / "keys" / "server.key", tmp_path / "stranger" / "server.key")
        stack.start("tokenizer-2", tokenizer_curve_keys=tmp_path / "stranger")
        refusals = ("gateway", "scheduler", "tokenizer-2")
        for name in refusals:
            eventually(lambda: "connection refused" in stack.log(name).read_text(), 120, f"{name}\n{stack.tail()}")  # noqa: B023
        with pytest.raises(grpc.RpcError) as refused:
            client.generate("Hello", max_tokens=1, timeout=2)
        assert refused.value.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
        assert "peer up" not in stack.log("gateway").read_text()

        stack.start("tokenizer")
        client.wait_ready(180)
        result = client.generate("The capital of France is", max_tokens=4, temperature=0.0)
        assert len(result.token_ids) == 4
        stack.restart("scheduler")  # keys are read again, and everyone comes back
        again = client.generate("The capital of France is", max_tokens=4, temperature=0.0)
        assert again.token_ids == result.token_ids
        for name in refusals:
            assert stack.log(name).read_text().count("connection refused") < 40, "the log is flooded"
    except BaseException:
        print(stack.tail())
        raise
    finally:
        client.close()
        stack.stop()
