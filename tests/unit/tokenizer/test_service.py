"""The service over real links: a gateway and a scheduler that are this test, in one event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from quartet.services.tokenizer.chat_template import ChatTemplate
from quartet.services.tokenizer.loaded import LoadedTokenizer
from quartet.services.tokenizer.prompt_encoder import PromptEncoder
from quartet.services.tokenizer.service import TokenizerService
from quartet.services.tokenizer.settings import TokenizerSettings
from quartet.shared.config import version
from quartet.shared.link import Identity, Peer, Status
from quartet.shared.messages import (
    Abort,
    Accepted,
    AnyMessage,
    CallFailed,
    ChatMessage,
    ChatPrompt,
    ChoicePast,
    Decode,
    Decoded,
    Deltas,
    Encode,
    Encoded,
    ErrorCode,
    Failed,
    FinishReason,
    GetLoads,
    Loads,
    ModelInfo,
    NewRequest,
    Output,
    Outputs,
    Prompt,
    Role,
    Submit,
    TextPrompt,
    TokensPrompt,
    WatchedSpan,
    WatchedSpans,
    WatchSpans,
)
from quartet.shared.sampling_params import SamplingParams, TextParams
from quartet.shared.transport import Binder

T = TypeVar("T")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


class Neighbour:
    """A bound end of a link that keeps what it is told."""

    def __init__(self, role: Role, address: str, model: ModelInfo | None = None) -> None:
        self.inbox: asyncio.Queue[AnyMessage] = asyncio.Queue()
        self.changed = asyncio.Event()
        self.peer: Peer | None = None
        self.status = Status(0, 0, True)
        self.binder = Binder(address, Identity(role, role.name.lower(), model=model), self, lambda: self.status)
        self.binder.start()

    def on_up(self, peer: Peer) -> None:
        self.peer = peer
        self.changed.set()

    def on_down(self, peer: Peer, reason: str) -> None:
        self.peer = None
        self.changed.set()

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        self.inbox.put_nowait(message)

    def on_status(self, peer: Peer) -> None:
        self.changed.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def get(self, kind: type[T]) -> T:
        async with asyncio.timeout(10):
            message = await self.inbox.get()
        assert isinstance(message, kind), message
        return message

    def send(self, message: Any) -> None:
        assert self.peer is not None
        self.peer.send(message)


class Line:
    def __init__(self, service: TokenizerService, gateway: Neighbour, scheduler_address: str, model: ModelInfo) -> None:
        self.service, self.gateway = service, gateway
        self._scheduler_address, self._model = scheduler_address, model

    async def start_scheduler(self) -> Neighbour:
        scheduler = Neighbour(Role.SCHEDULER, self._scheduler_address, self._model)
        await scheduler.until(lambda: scheduler.peer)
        peer = self.gateway.peer
        assert peer is not None
        await self.gateway.until(lambda: peer.ready and peer.model is not None)
        return scheduler

    def submit(self, request_id: int, prompt: Prompt, **fields: Any) -> None:
        sampling = SamplingParams(max_tokens=8)
        self.gateway.send(Submit(request_id, 1, prompt, sampling, TextParams(), [ChoicePast(0)], **fields))


def run(tmp_path: Path, loaded: LoadedTokenizer, model: ModelInfo, body: Callable[[Line], Awaitable[None]]) -> None:
    @asynccontextmanager
    async def line() -> AsyncIterator[Line]:
        settings = TokenizerSettings(run_dir=str(tmp_path), name="t", drain_timeout=5.0)
        gateway = Neighbour(Role.GATEWAY, settings.gateway_addresses[0])
        template = ChatTemplate(TEMPLATE, {})
        service = TokenizerService(settings, loaded, template, model.model_fingerprint)
        service.start()
        try:
            await gateway.until(lambda: gateway.peer)
            yield Line(service, gateway, settings.scheduler_address, model)
        finally:
            service.close()
            gateway.binder.close()

    async def main() -> None:
        async with line() as line_:
            await body(line_)

    asyncio.run(main())


def test_a_stream_from_text_to_text_over_a_restarted_scheduler(
    tmp_path: Path, tiny: LoadedTokenizer, model_info: Callable[..., ModelInfo]
) -> None:
    async def body(line: Line) -> None:
        peer = line.gateway.peer
        assert peer is not None and not peer.ready and peer.tokenizer_fingerprint == "tiny"
        assert peer.version == version()
        line.submit(1, TextPrompt("hi"))  # before there is a scheduler: it waits
        scheduler = await line.start_scheduler()
        assert peer.model == model_info()
        ids = tiny.encode("hi", True)
        assert (await line.gateway.get(Accepted)).prompt_token_ids == ids
        request = await scheduler.get(NewRequest)
        assert request.prompt_token_ids == ids and request.sampling.max_tokens == 8
        scheduler.send(Outputs([Output(1, 1, 0, 0, [100])]))
        assert (await line.gateway.get(Deltas)).items[0].text == "a"

        scheduler.binder.close()
        await line.gateway.until(lambda: not peer.ready)
        scheduler = await line.start_scheduler()
        assert (await scheduler.get(NewRequest)).choices == [ChoicePast(0, [100])]
        scheduler.send(Outputs([Output(1, 1, 0, 1, [101, 1], finish_reason=FinishReason.STOP)]))
        (delta,) = (await line.gateway.get(Deltas)).items
        assert (delta.text, delta.finish_reason) == ("b", FinishReason.STOP)
        scheduler.binder.close()

    run(tmp_path, tiny, model_info(), body)


def test_calls(tmp_path: Path, tiny: LoadedTokenizer, model_info: Callable[..., ModelInfo]) -> None:
    async def body(line: Line) -> None:
        gateway = line.gateway
        gateway.send(GetLoads(1))
        assert (await gateway.get(CallFailed)).code is ErrorCode.UNAVAILABLE
        gateway.send(Encode(2, TextPrompt("the")))
        assert await gateway.get(Encoded) == Encoded(2, tiny.encode("the", True), [b"the"])
        gateway.send(Decode(3, [0, 100, 2]))
        assert (await gateway.get(Decoded)).text == "<s>a<tool>"
        gateway.send(Decode(4, [100, 9999]))
        failed = await gateway.get(CallFailed)
        assert failed.field == "token_ids" and "9999" in failed.message
        gateway.send(Encode(5, ChatPrompt([ChatMessage("robot", "x")])))
        assert (await gateway.get(CallFailed)).field == "messages"
        scheduler = await line.start_scheduler()
        gateway.send(GetLoads(6))
        asked = await scheduler.get(GetLoads)
        scheduler.send(Loads(asked.call_id, *range(9)))
        assert (await gateway.get(Loads)).call_id == 6
        scheduler.binder.close()

    run(tmp_path, tiny, model_info(), body)


def test_a_long_prompt_holds_up_neither_streams_nor_short_prompts(
    tmp_path: Path, tiny: LoadedTokenizer, model_info: Callable[..., ModelInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, release = threading.Event(), threading.Event()
    encode = PromptEncoder.encode

    def slow(self: PromptEncoder, prompt: Prompt, max_model_len: int | None, *more: Any) -> list[int]:
        if isinstance(prompt, TextPrompt) and len(prompt.text) > 100_000:
            entered.set()
            assert release.wait(10)
            raise RuntimeError("fell over at the end")
        return encode(self, prompt, max_model_len)

    monkeypatch.setattr(PromptEncoder, "encode", slow)

    async def body(line: Line) -> None:
        scheduler = await line.start_scheduler()
        line.submit(1, TextPrompt("a"))
        await line.gateway.get(Accepted)
        await scheduler.get(NewRequest)
        for request_id in (2, 3):
            line.submit(request_id, TextPrompt("x" * 200_000))
        await asyncio.to_thread(entered.wait, 10)
        scheduler.send(Outputs([Output(1, 1, 0, 0, [100])]))
        assert (await line.gateway.get(Deltas)).items[0].text == "a"
        line.submit(4, TextPrompt("b"))
        assert (await line.gateway.get(Accepted)).request_id == 4
        assert line.service.status().outstanding == 2
        line.gateway.send(Abort(3, 1))  # while it waits for the thread: never encoded
        line.gateway.send(Decode(1, []))
        await line.gateway.get(Decoded)
        release.set()
        failed = await line.gateway.get(Failed)
        assert (failed.request_id, failed.code) == (2, ErrorCode.INTERNAL)
        line.gateway.send(Decode(2, []))
        await line.gateway.get(Decoded)
        scheduler.binder.close()

    try:
        run(tmp_path, tiny, model_info(), body)
    finally:
        release.set()


def test_draining_waits_for_streams_and_takes_no_more(
    tmp_path: Path, tiny: LoadedTokenizer, model_info: Callable[..., ModelInfo]
) -> None:
    async def body(line: Line) -> None:
        scheduler = await line.start_scheduler()
        line.submit(1, TextPrompt("a"))
        await line.gateway.get(Accepted)
        draining = asyncio.ensure_future(line.service.drain())
        peer = line.gateway.peer
        assert peer is not None
        await line.gateway.until(lambda: peer.draining)
        line.submit(2, TextPrompt("a"))
        assert (await line.gateway.get(Failed)).code is ErrorCode.UNAVAILABLE
        assert not draining.done()
        scheduler.send(Outputs([Output(1, 1, 0, 0, [100], finish_reason=FinishReason.LENGTH)]))
        await line.gateway.get(Deltas)
        async with asyncio.timeout(5):
            await draining
        scheduler.binder.close()

    run(tmp_path, tiny, model_info(), body)


# --- the process ----------------------------------------------------------------------------------


class Process:
    """The real service as a process; `text` is what it has logged so far."""

    def __init__(self, tmp_path: Path, *flags: str) -> None:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("QUARTET_")}
        if "QUARTET_CACHE_DIR" in os.environ:
            environ["QUARTET_CACHE_DIR"] = os.environ["QUARTET_CACHE_DIR"]
        command = [sys.executable, "-m", "quartet.services.tokenizer", "--run-dir", str(tmp_path), *flags]
        self.process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
        self.text = ""

    def until(self, text: str) -> None:
        assert self.process.stderr is not None
        while text not in self.text:
            line = self.process.stderr.readline()
            assert line, f"ended without {text!r}: {self.text}"
            self.text += line

    def wait(self) -> int:
        try:
            self.text += self.process.communicate(timeout=60)[1]
        finally:
            self.process.kill()
        return self.process.returncode


def test_sigterm_ends_an_idle_process_with_0(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.until("tokenizer started")
    process.process.send_signal(signal.SIGTERM)
    assert process.wait() == 0


def test_a_second_sigterm_forces(tmp_path: Path) -> None:
    process = Process(tmp_path)

    async def main() -> None:
        gateway = Neighbour(Role.GATEWAY, TokenizerSettings(run_dir=str(tmp_path)).gateway_addresses[0])
        await gateway.until(lambda: gateway.peer)
        peer = gateway.peer
        assert peer is not None
        gateway.send(Submit(1, 1, TextPrompt("a"), SamplingParams(), TextParams(), [ChoicePast(0)]))  # never ends
        gateway.send(Encode(1, TextPrompt("a")))
        await gateway.get(Encoded)
        process.process.send_signal(signal.SIGTERM)
        await gateway.until(lambda: peer.draining)
        assert process.process.poll() is None
        process.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait) == 1
        gateway.binder.close()

    process.until("tokenizer started")
    asyncio.run(main())


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--chat-template", "/nowhere/chat.jinja"], 2, "chat_template: cannot read /nowhere/chat.jinja"),
        (["--chat-template", "{% for %}"], 2, "chat_template: "),
        (["--encode-threads", "0"], 2, "encode-threads"),
        (["--model", "/nowhere/model.gguf"], 1, "/nowhere/model.gguf"),
    ],
)
def test_what_is_wrong_at_start_is_said_in_one_line(tmp_path: Path, flags: list[str], code: int, says: str) -> None:
    process = Process(tmp_path, *flags)
    assert process.wait() == code
    assert says in process.text and "Traceback" not in process.text


def test_prompts_and_outputs_are_told_while_a_gateway_traces(
    tmp_path: Path, tiny: LoadedTokenizer, model_info: Callable[..., ModelInfo]
) -> None:
    async def body(line: Line) -> None:
        scheduler = await line.start_scheduler()
        began = time.time()
        line.gateway.send(WatchSpans(enabled=True))
        line.submit(1, TextPrompt("hi"))
        ids = (await line.gateway.get(Accepted)).prompt_token_ids
        await scheduler.get(NewRequest)
        line.submit(2, TokensPrompt([100]))
        await line.gateway.get(Accepted)
        scheduler.send(Outputs([Output(1, 1, 0, 0, [100, 101]), Output(2, 1, 0, 0, [102])]))
        spans, num_deltas = list[WatchedSpan](), 0
        async with asyncio.timeout(30):
            while len(spans) < 3:
                message = await line.gateway.inbox.get()
                num_deltas += isinstance(message, Deltas)
                spans += message.spans if isinstance(message, WatchedSpans) else []
        assert num_deltas == 1
        assert [(span.name, span.num_tokens, span.request_id) for span in spans] == [
            ("tokenize", len(ids), 1), ("tokenize", 1, 2), ("detokenize", 3, None),
        ]  # fmt: skip
        assert all(began - 1 <= span.at <= time.time() + 1 and 0 <= span.duration_us < 30e6 for span in spans)

        assert line.service.spans is not None
        line.gateway.send(WatchSpans(enabled=False))
        line.submit(3, TokensPrompt([100]))
        await line.gateway.get(Accepted)
        assert line.service.spans is None
        scheduler.binder.close()

    run(tmp_path, tiny, model_info(), body)


def test_a_gateway_that_goes_ends_it(
    tmp_path: Path, tiny: LoadedTokenizer, model_info: Callable[..., ModelInfo]
) -> None:
    async def body(line: Line) -> None:
        scheduler = await line.start_scheduler()
        line.gateway.send(WatchSpans(enabled=True))
        line.submit(1, TokensPrompt([100]))
        await line.gateway.get(Accepted)
        assert line.service.spans is not None
        line.gateway.binder.close()
        async with asyncio.timeout(30):
            while line.service.spans is not None:
                await asyncio.sleep(0.01)
        scheduler.binder.close()

    run(tmp_path, tiny, model_info(), body)
