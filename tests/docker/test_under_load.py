"""Containers are killed, restarted, cut off, replaced and added under load, and no stream is lost or changed."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.compose import PROJECT, Compose, ComposeLine, docker

from bench.chaos import Chaos
from bench.chaos_line import Fault
from quartet.shared.client import AsyncClient

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

BEHIND = ("tokenizer", "scheduler", "executor")
HTTP_PROMPTS = ("Once upon a time", "The history of Rome began when", "My dear friend, I must tell you")


class ComposeChaos(Chaos):
    """The faults given, in turn; streams over HTTP beside those over gRPC while `http` is set."""

    def __init__(self, compose: Compose, faults: list[Fault], http: bool) -> None:
        arguments = argparse.Namespace(
            seed=3, cases=4, max_tokens=64, streams=6, seconds=500.0, pause=(1.0, 2.0), quiet=False
        )
        super().__init__(ComposeLine(compose), arguments)  # type: ignore[arg-type]
        self._faults = faults
        self._http = http
        self._url = f"http://{compose.http_address}/v1"
        self.over_http: dict[str, list[str]] = {prompt: [] for prompt in HTTP_PROMPTS}

    def schedule(self) -> Iterator[Fault]:
        yield from self._faults

    async def strike(self, client: AsyncClient, fault: Fault) -> None:
        async with asyncio.timeout(60):
            while sum(bool(each.times) and not each.complete for each in self.followed) < 2:
                await asyncio.sleep(0.05)
        await super().strike(client, fault)

    async def run(self) -> dict[str, Any]:
        async with openai.AsyncOpenAI(base_url=self._url, api_key="none", max_retries=0, timeout=120) as client:
            if not self._http:
                return await super().run()
            for prompt in HTTP_PROMPTS:
                self.over_http[prompt].append(await self._stream(client, prompt))
            streams = [asyncio.create_task(self._follow_http(client, prompt)) for prompt in HTTP_PROMPTS]
            report = await super().run()
            await asyncio.gather(*streams)
            return report

    async def _follow_http(self, client: openai.AsyncOpenAI, prompt: str) -> None:
        while not self.stopping:
            self.over_http[prompt].append(await self._stream(client, prompt))

    async def _stream(self, client: openai.AsyncOpenAI, prompt: str) -> str:
        text, ended = "", False
        stream = await client.completions.create(model="", prompt=prompt, max_tokens=24, temperature=0, stream=True)
        async for chunk in stream:
            text += chunk.choices[0].text
            ended = ended or chunk.choices[0].finish_reason == "length"
        assert ended, f"{prompt!r} ended early, after {text!r}"
        return text


def check(compose: Compose, faults: list[Fault], http: bool = True) -> None:
    chaos = ComposeChaos(compose, faults, http)
    report = asyncio.run(chaos.run())
    print(f"\n{report}")
    assert not chaos.problems, chaos.problems
    assert report["faults"] == len(faults), "not all faults were reached"
    assert report["streams"] >= 6
    assert not any(report[key] for key in ("lost", "gaps", "duplicates", "changed", "sampled_changed")), report
    if http:
        assert all(len(texts) > 1 and len(set(texts)) == 1 for texts in chaos.over_http.values()), chaos.over_http


def test_killed_behind_the_gateway(line: Compose) -> None:
    before = {service: line.inspect(service)["RestartCount"] for service in BEHIND}
    check(line, [Fault("kill", (service,)) for service in BEHIND])
    assert {service: line.inspect(service)["RestartCount"] - before[service] for service in BEHIND} == dict.fromkeys(
        BEHIND, 1
    ), "the restart policy did not bring each back once"


def test_restarted_behind_the_gateway(line: Compose) -> None:
    check(line, [Fault("restart", (service,)) for service in BEHIND])


def test_cut_off_and_connected_again(line: Compose) -> None:
    check(line, [Fault("disconnect", (service,), 4.0) for service in ("scheduler", "executor")])


def test_the_scheduler_is_replaced_by_another_image(line: Compose) -> None:
    check(line, [Fault("replace", ("scheduler",))])
    assert line.inspect("scheduler")["Config"]["Image"] == f"{PROJECT}-scheduler:next"
    assert "scheduler-next" in line.logs("executor"), "the executor has not met the new image's scheduler"
    line("up", "-d", "--wait", "--no-deps", "scheduler")


def test_a_second_tokenizer_takes_over_from_the_first(line: Compose) -> None:
    try:
        check(line, [Fault("add", ("tokenizer",)), Fault("remove", ("tokenizer",))])
        assert len(line.containers("tokenizer")) == 1
    finally:
        with contextlib.suppress(AssertionError):
            docker("start", f"{PROJECT}-tokenizer-1")
        line("up", "-d", "--wait", "--no-deps", "--scale", "tokenizer=1", "tokenizer")


def test_grpc_streams_outlive_the_gateway(line: Compose) -> None:
    """HTTP streams break with it: OpenAI's protocol has no way to attach again."""
    check(line, [Fault("kill", ("gateway",)), Fault("restart", ("gateway",))], http=False)
