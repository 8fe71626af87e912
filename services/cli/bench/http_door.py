"""Requests to any server with OpenAI's API: completions or chats, as server-sent events."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import msgspec

from quartet.services.cli.bench.record import Prompt, Record

MAX_REFUSAL = 500


class Events:
    """The data of server-sent events, from pieces of the stream that are cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""
        self.done = False

    def feed(self, piece: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    self.done = True
                else:
                    yield data


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class Reader:
    """Takes the events of one answer of OpenAI's API into a record. Chunks are counted when they bring a token or
    text: the first one of a chat often has a role alone. Where the server tells no usage, a chunk is a token."""

    def __init__(self, record: Record, keep_answer: bool) -> None:
        self._record = record
        self._keep = keep_answer
        self._texts: list[str] = []
        self._finished = False
        self._usage: _Usage | None = None
        self._num_ids = 0

    def take(self, event: bytes) -> bool:
        """Whether it brought anything of the answer."""
        parsed = _event.decode(event)
        if parsed.error is not None:
            self._record.fail("stream error", _error_text(parsed.error))
            return False
        self._usage = parsed.usage or self._usage
        brought = False
        for choice in parsed.choices:
            delta, text = choice.delta, choice.text
            if delta is not None:
                text = delta.content
                brought = brought or bool(delta.reasoning_content or delta.reasoning or delta.tool_calls)
            brought = brought or bool(text or choice.token_ids)
            self._num_ids += len(choice.token_ids or ())
            self._finished = self._finished or choice.finish_reason is not None
            if self._keep and text:
                self._texts.append(text)
        return brought

    def end(self, done: bool) -> None:
        """The stream is over; `done` is whether it said so."""
        record, usage = self._record, self._usage
        record.answer_text = "".join(self._texts)
        record.output_tokens = self._num_ids or len(record.times)
        if usage is not None:
            record.prompt_tokens = usage.prompt_tokens
            record.output_tokens = usage.completion_tokens or record.output_tokens
            details = usage.prompt_tokens_details
            record.cached_tokens = (details.cached_tokens or 0) if details is not None else 0
        if record.error:
            return
        if not done and not self._finished:
            record.fail("stream cut", "the stream ended before its last event")
        elif not record.times:
            record.fail("empty answer", "the stream ended without a token")


_event = msgspec.json.Decoder(_Event)

Body = Callable[[Prompt, int], dict[str, Any]]
"""What is posted for a prompt and a number of output tokens."""
MakeReader = Callable[[Record, bool], Any]
"""A Reader, or what stands in for it where the API is another one."""


@dataclasses.dataclass(frozen=True)
class HttpDoor:
    """`url` is where streams are asked for."""

    session: aiohttp.ClientSession
    url: str
    body: Body
    make_reader: MakeReader = Reader

    async def send(self, prompt: Prompt, output_tokens: int, keep_answer: bool = False) -> Record:
        data = msgspec.json.encode(self.body(prompt, output_tokens))
        record = Record(time.perf_counter())
        reader = self.make_reader(record, keep_answer)
        try:
            async with self.session.post(self.url, data=data, headers=_JSON) as response:
                if response.status != 200:
                    refusal = await response.content.read(64 << 10)
                    record.fail(f"HTTP {response.status}", refusal_text(refusal))
                else:
                    await self._receive(response, record, reader)
        except TimeoutError:
            record.fail("timeout", "no end within the request's timeout")
        except aiohttp.ClientConnectorError as error:
            record.fail("connection refused", str(error))
        except (aiohttp.ClientError, OSError) as error:
            record.fail("connection broken", str(error) or type(error).__name__)
        except msgspec.DecodeError as error:
            record.fail("bad event", str(error))
        record.ended = time.perf_counter()
        return record

    async def _receive(self, response: aiohttp.ClientResponse, record: Record, reader: Any) -> None:
        events = Events()
        times: Any = record.times
        async for piece in response.content.iter_any():
            now = time.perf_counter()
            for event in events.feed(piece):
                if reader.take(event):
                    times.append(now)
        reader.end(events.done)


_JSON = {"content-type": "application/json"}


def session(key: str = "", timeout: float | None = None) -> aiohttp.ClientSession:
    """For as many requests at once as are sent. Each has a connection of its own: some servers close kept ones without
    a word, which looks like a failed request."""
    headers = {"authorization": f"Bearer {key}"} if key else None
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(timeout))


class RefusedError(Exception):
    """One line: what a server said, or that there is none."""


async def list_models(session: aiohttp.ClientSession, base: str, seconds: float) -> list[dict[str, Any]]:
    """`base` ends with /v1. Raises RefusedError."""
    try:
        async with session.get(f"{base}/models", timeout=aiohttp.ClientTimeout(seconds)) as response:
            body = await response.read()
    except TimeoutError:
        raise RefusedError(f"no answer from {base} within {seconds:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise RefusedError(f"no server on {base} ({error})") from None
    if response.status != 200:
        raise RefusedError(f"{base}/models: HTTP {response.status}: {refusal_text(body)}")
    try:
        return [model for model in msgspec.json.decode(body)["data"] if model["id"]]
    except (msgspec.DecodeError, KeyError, TypeError):
        raise RefusedError(f"{base}/models is no list of models: is this OpenAI's API?") from None


def refusal_text(body: bytes) -> str:
    """The message in an error's body, or the body."""
    try:
        return _error_text(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return body.decode(errors="replace").strip()[:MAX_REFUSAL]


def _error_text(found: Any) -> str:
    while isinstance(found, dict):
        inner = found.get("error") or found.get("message") or found.get("detail")
        if inner is None:
            break
        found = inner
    return str(found)[:MAX_REFUSAL]


def openai_body(endpoint: str, model: str, options: dict[str, Any]) -> Body:
    """`endpoint` is completions or chat; `options` are added to every request."""
    common = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **options}
    name = "messages" if endpoint == "chat" else "prompt"
    return lambda prompt, output_tokens: {**common, name: prompt, "max_tokens": output_tokens}
