"""`quartet bench` on the real line, through both doors."""

import json

import pytest

from quartet.services.cli.main import main


@pytest.mark.parametrize("door", ["--address", "--url"])
def test_conversations_through_either_door(stack, capsys, monkeypatch, door):
    monkeypatch.delenv("QUARTET_API_KEY", raising=False)
    address = f"http://{stack.http_address}" if door == "--url" else stack.address
    arguments = ["--mix", "multi-turn", "--num-turns", "2", "--input-len", "12", "--output-len", "5"]
    arguments += ["--think-time", "0", "--prefix-len", "32", "--concurrency", "3", "--num-requests", "6", "--json"]
    assert main(["bench", door, address, *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    (result,) = report["results"]
    assert (result["completed"], result["failed"], result["errors"]) == (6, 0, {})
    assert report["model_id"] == "smollm2-135m-instruct"
    assert result["total_cached_tokens"] > 0, "the history was in the cache"
    assert result["total_input_tokens"] > 6 * 32
    assert result["median_ttft_ms"] <= result["median_e2el_ms"]
    assert 1 <= result["max_concurrent_requests"] <= 3


def test_both_doors_are_asked_for_the_same_lengths(stack, capsys, monkeypatch):
    monkeypatch.delenv("QUARTET_API_KEY", raising=False)
    totals = []
    for door, address in (("--address", stack.address), ("--url", f"http://{stack.http_address}")):
        arguments = ["--mix", "chat", "--input-len", "8", "--output-len", "4", "--num-requests", "5", "--json"]
        assert main(["bench", door, address, "--prompts", "ids", "--seed", "5", "--rate", "50", *arguments]) == 0
        (result,) = json.loads(capsys.readouterr().out)["results"]
        totals.append((result["total_input_tokens"], result["total_output_tokens"]))
    assert totals[0] == totals[1] and totals[0][1] > 5
