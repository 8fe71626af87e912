"""The README's examples of HTTP, run as they are written there."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def test_readme_openai_client(stack):
    (example,) = re.findall(r"```python\n(from openai .*?)```", README.read_text(), re.DOTALL)
    code = example.replace("127.0.0.1:8000", stack.http_address)
    assert code != example
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0 and len(ran.stdout) > 10, ran.stderr


def test_readme_curl(stack):
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    (example,) = re.findall(r"```\n(curl .*?)```", README.read_text(), re.DOTALL)
    command = "curl -sS " + example.replace("127.0.0.1:8000", stack.http_address).removeprefix("curl ")
    ran = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    answer = json.loads(ran.stdout)
    assert answer["choices"][0]["message"]["content"] and answer["usage"]["completion_tokens"] <= 32, ran


def test_a5_a_stop_string_inside_one_token(stack):
    """A5: DEF is one token of this vocabulary; nothing of it after the stop string comes out, in no mode."""
    from support.http import post

    body = {"prompt": "x", "max_tokens": 2, "logit_bias": {"33203": 100}, "temperature": 0}
    for stop, text in ((["DE"], ""), (["EF", "DE"], ""), (["EF"], "D")):
        whole = post(stack.http_address, "/v1/completions", body | {"stop": stop}).json()["choices"][0]
        assert whole["finish_reason"] == "stop" and whole["stop_reason"] in stop and whole["text"] == text
        parts = post(stack.http_address, "/v1/completions", body | {"stop": stop, "stream": True}).events()
        assert "".join(part["choices"][0]["text"] for part in parts) == text
        assert parts[-1]["choices"][0]["stop_reason"] == whole["stop_reason"]
