"""`quartet bench` as it is typed, on a scripted server."""

import asyncio
import json
import os
import re
import signal

import pytest
from support import openai_scripted as scripted

from quartet.services.cli.bench.options import parse
from quartet.services.cli.main import main

ANSWER = scripted.says(scripted.piece(" a"), scripted.piece(" b"), scripted.usage(9, 2, 3), scripted.DONE)


@pytest.fixture
def server(monkeypatch):
    for name in ("QUARTET_API_KEY", "OPENAI_API_KEY", "QUARTET_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    with scripted.scripted_server(ANSWER) as running:
        yield running


def bench(*arguments):
    return main(["bench", *map(str, arguments)])


def test_one_run_as_json(server, capsys, tmp_path):
    path = tmp_path / "out.json"
    arguments = ["--url", server.url, "--num-requests", 6, "--concurrency", 2, "--input-len", 5, "--output-len", 2]
    assert bench(*arguments, "--slo", "ttft:60000", "--json", "-o", path) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert json.loads(path.read_text()) == report and captured.err == ""
    assert (report["backend"], report["model_id"], report["interrupted"]) == ("openai", "scripted", False)
    (result,) = report["results"]
    assert (result["completed"], result["failed"]) == (6, 0)
    assert (result["max_concurrency"], result["request_rate"]) == (2, "inf")
    assert (result["total_input_tokens"], result["total_output_tokens"], result["total_cached_tokens"]) == (54, 12, 18)
    assert result["goodput_completed"] == 6 and result["p99_ttft_ms"] >= result["median_ttft_ms"] > 0
    # One to warm up, and all prompts are different ones of five words.
    assert len({body["prompt"] for body in server.bodies}) == 7
    assert {len(body["prompt"].split()) for body in server.bodies} == {5}
    assert {body["max_tokens"] for body in server.bodies[1:]} == {2} and server.bodies[1]["ignore_eos"]


def test_the_same_seed_asks_the_same(server, capsys):
    arguments = ["--url", server.url, "--num-requests", 4, "--concurrency", 1, "--warmup", 0, "--mix", "chat", "--json"]
    assert bench(*arguments) == bench(*arguments) == bench(*arguments, "--seed", 1) == 0
    first, again, other = (server.bodies[i : i + 4] for i in (0, 4, 8))
    assert first == again != other
    capsys.readouterr()


def test_a_sweep_has_a_table_and_a_page(server, capsys, tmp_path):
    path = tmp_path / "sweep.html"
    arguments = ["--url", server.url, "--rate", 200, 400, "--num-requests", 5, "--endpoint", "chat"]
    assert bench(*arguments, "--plot", path, "-o", tmp_path / "a.json") == 0
    captured = capsys.readouterr()
    for words in ("200 req/s", "400 req/s", "TTFT median", "tok/s"):
        assert words in captured.out
    assert "the plot is" in captured.err
    page = path.read_text()
    assert page.count("<tr>") == 3 and "<svg" in page and "200 req/s" in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page), "the page needs nothing from elsewhere"
    prompts = [body["messages"][0]["content"] for body in server.bodies]
    assert len(set(prompts)) == 11, "no two runs of a sweep have a prompt in common"
    picture = tmp_path / "both.png"
    assert bench(*arguments, "--plot", picture, "--compare", tmp_path / "a.json") == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()


def test_multi_turn_sends_the_history(server, capsys):
    arguments = ["--mix", "multi-turn", "--endpoint", "chat", "--num-requests", 3, "--think-time", 0, "--warmup", 0]
    assert bench("--url", server.url, "--output-len", 4, "--sigma", 0, "--concurrency", 1, *arguments) == 0
    lengths = [len(body["messages"]) for body in server.bodies]
    assert lengths == [1, 3, 5] and server.bodies[2]["messages"][:3] == server.bodies[1]["messages"]
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": " a b"}
    capsys.readouterr()


def test_failures_are_told_and_the_status_says_so(server, capsys):
    refusing = scripted.refuses(429, '{"error": {"message": "slow down"}}')

    async def every_second(body, request):
        return await (refusing if len(server.bodies) % 2 else ANSWER)(body, request)

    server.answer = every_second
    assert bench("--url", server.url, "--num-requests", 4, "--concurrency", 1, "--warmup", 0) == 1
    out = capsys.readouterr().out
    assert re.search(r"Failed requests +2", out) and "2 x HTTP 429: slow down" in out


def test_prompts_that_the_server_had_seen_are_told(server, capsys):
    assert bench("--url", server.url, "--num-requests", 2) == 0
    assert "Take another --seed" in capsys.readouterr().out
    assert bench("--url", server.url, "--num-requests", 2, "--prefix-len", 4) == 0
    assert "Take another --seed" not in capsys.readouterr().out


def test_interrupting_prints_what_there_is(server, capsys):
    async def third_hangs(body, request):
        if len(server.bodies) < 3:
            return await ANSWER(body, request)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)
        raise AssertionError

    server.answer = third_hangs
    assert bench("--url", server.url, "--concurrency", 1, "--warmup", 0, "--json") == 130
    report = json.loads(capsys.readouterr().out)
    assert report["interrupted"] and report["results"][0]["completed"] == 2
    assert report["results"][0]["cancelled"] == 1 and report["results"][0]["failed"] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "http://127.0.0.1:1"], "no server on http://127.0.0.1:1/v1"),
        (["--address", "127.0.0.1:1"], "no server on 127.0.0.1:1"),
        (["--url", "{url}", "--model", "other"], "no model other on {url}/v1, but scripted"),
        (["--url", "{url}/elsewhere"], "HTTP 404"),
    ],
)
def test_a_server_that_is_not_there(server, capsys, arguments, said):
    assert bench(*(argument.format(url=server.url) for argument in arguments)) == 1
    captured = capsys.readouterr()
    assert said.format(url=server.url) in captured.err and not captured.out and captured.err.count("\n") == 1


def test_a_first_request_that_is_refused_ends_it(server, capsys):
    server.answer = scripted.refuses(400, '{"error": {"message": "ignore_eos: not here"}}')
    assert bench("--url", server.url) == 1
    assert "HTTP 400: ignore_eos: not here" in capsys.readouterr().err
    assert len(server.bodies) == 1


def test_keys(capsys, monkeypatch):
    monkeypatch.delenv("QUARTET_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with scripted.scripted_server(ANSWER, "right") as server:
        assert bench("--url", server.url) == 1
        assert "the API key is wrong (set OPENAI_API_KEY)" in capsys.readouterr().err
        monkeypatch.setenv("OPENAI_API_KEY", "wrong")
        assert bench("--url", server.url) == 1
        assert "(OPENAI_API_KEY has a key that it does not take)" in capsys.readouterr().err
        monkeypatch.setenv("OPENAI_API_KEY", "right")
        assert bench("--url", server.url, "--num-requests", 1) == 0
        assert "right" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        "--rate 1 2 --concurrency 3 4",
        "--rate 0",
        "--rate inf --duration 5",
        "--slo fast:3",
        "--num-requests 0",
        "--concurrency 0",
        "--sigma -1",
        "--mix other",
        "--endpoint chat --prompts ids",
        "--url http://x --mix multi-turn --prompts ids",
        "--url localhost:8000",
        "--extra-body {}1 --url http://x",
        "--extra-body [] --url http://x",
        '--extra-body {"a":1}',
        "--model x",
        "--plot out.pdf",
        "--plot /nowhere/out.png",
        "--output /nowhere/out.json",
        "--compare a.json",
    ],
)
def test_wrong_arguments(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        parse(arguments.split())
    assert caught.value.code == 2
    assert "quartet bench: error:" in capsys.readouterr().err


def test_files_that_are_none(capsys, tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text('{"results": [1]}')
    assert bench("--plot", tmp_path / "x.svg", "--compare", bad) == 2
    assert "bad.json" in capsys.readouterr().err
    assert bench("--dataset", tmp_path / "none.jsonl") == 2
    assert "none.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "points"),
    [
        ("", [(float("inf"), 32, 128)]),
        ("--rate 2", [(2.0, 0, 60)]),
        ("--rate inf --num-requests 9", [(float("inf"), 0, 9)]),
        ("--rate 1 4 --concurrency 8", [(1.0, 8, 30), (4.0, 8, 120)]),
        ("--concurrency 1 8 --mix multi-turn", [(float("inf"), 1, 16), (float("inf"), 8, 128)]),
        ("--concurrency 4 --duration 10", [(float("inf"), 4, None)]),
        ("--request-rate 1 --num-prompts 3 --max-concurrency 2", [(1.0, 2, 3)]),
    ],
)
def test_points_of_a_sweep(arguments, points):
    found = [(point.rate, point.concurrency, point.num_requests) for point in parse(arguments.split()).points]
    assert found == points
