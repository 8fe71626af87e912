"""Mixed requests over HTTP and gRPC at once: good ones, ones that are left, and broken ones."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from support.http import Reply, parse_reply, request_bytes

from quartet.shared.pb import inference_pb2 as pb
from quartet.shared.pb.inference_pb2_grpc import InferenceServiceStub

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
GREEDY = {"temperature": 0, "ignore_eos": True}
CONCURRENT = 24
LATE = 120.0

BROKEN_BODIES: list[tuple[str, Any]] = [
    ("/v1/completions", b'{"prompt": "cut'),
    ("/v1/completions", b"\xff\xfe" * 40),
    ("/v1/completions", b"[" * 5000),
    ("/v1/completions", {"prompt": ["a", [1]]}),
    ("/v1/completions", {"prompt": "a", "max_tokens": -3}),
    ("/v1/completions", {"prompt": "a", "n": 10**9}),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "(("}}),
    ("/v1/completions", {"prompt": [[300, 400]]}),
    ("/v1/completions", {"prompt": "x" * 5000}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 7}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 3}),
    ("/v1/responses", {"input": {"a": 1}}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}),
    ("/detokenize", {"tokens": [-1]}),
    ("/v1/nothing", {}),
]
BROKEN_BYTES = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
]


def good_http(kind: int, prompt: str, max_tokens: int) -> tuple[str, dict[str, Any]]:
    """A path and a body whose answer is always the same."""
    messages = [{"role": "user", "content": prompt}]
    limit = {"max_tokens": max_tokens}
    bodies = [
        ("/v1/completions", {"prompt": prompt, **GREEDY, **limit}),
        ("/v1/completions", {"prompt": prompt, "stream": True, "stop": ["\x00"], **GREEDY, **limit}),
        ("/v1/completions", {"prompt": [list(prompt.encode()), [65, 66, 67]], "n": 2, **GREEDY, **limit}),
        ("/v1/completions", {"prompt": prompt, "echo": True, "logprobs": 2, "temperature": 0, "max_tokens": 0}),
        ("/v1/completions", {"prompt": prompt, "seed": 5, "top_k": 40, "repetition_penalty": 1.1, **limit}),
        ("/v1/chat/completions", {"messages": messages, **GREEDY, **limit}),
        ("/v1/chat/completions", {"messages": messages, "stream": True, "logprobs": True, **GREEDY, **limit}),
        (
            "/v1/chat/completions",
            {
                "messages": messages,
                "temperature": 0,
                "max_tokens": 40,
                "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
            },
        ),
        ("/v1/responses", {"input": prompt, "temperature": 0, "max_output_tokens": max_tokens + 16}),
        ("/v1/messages", {"messages": messages, "temperature": 0, "stream": True, "max_tokens": max_tokens}),
        ("/tokenize", {"prompt": prompt}),
    ]
    return bodies[kind % len(bodies)]


class Soak:
    """`counts` tells what was done; a wrong answer raises. The same request has the same answer, whatever else runs."""

    def __init__(self, address: str, http_address: str, seed: int) -> None:
        self._address = address
        self._host, _, port = http_address.rpartition(":")
        self._port = int(port)
        self._random = random.Random(seed)
        self._answers: dict[str, Any] = {}
        self.counts: collections.Counter[str] = collections.Counter()

    async def run(self, count: int) -> None:
        """A third of the requests is aborted at random times, a tenth is broken."""
        kinds = ["aborted"] * (count // 3) + ["broken"] * (count // 10)
        kinds += ["good"] * (count - len(kinds))
        self._random.shuffle(kinds)
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            self._stub = InferenceServiceStub(channel)
            work = iter(kinds)

            async def worker() -> None:
                for kind in work:
                    async with asyncio.timeout(LATE):
                        await self._one(kind)
                    self.counts[kind] += 1

            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(CONCURRENT, count)):
                    tasks.create_task(worker())

    async def _one(self, kind: str) -> None:
        over_grpc = self._random.random() < 0.4
        if kind == "broken":
            await (self._broken_grpc() if over_grpc else self._broken_http())
            return
        prompt = self._random.choice(["The same beginning of many prompts, and then ", "Q: "])
        prompt += "abcdefgh"[self._random.randrange(4) :] * self._random.choice([1, 5])
        max_tokens = self._random.choice([1, 8, 24])
        if over_grpc:
            call = self._grpc(self._random.randrange(4), prompt, max_tokens)
        else:
            call = self._http(*good_http(self._random.randrange(64), prompt, max_tokens))
        if kind == "good":
            await call
            return
        task = asyncio.ensure_future(call)
        await asyncio.wait([task], timeout=self._random.random() ** 2 * 0.4)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    # --- HTTP ---

    async def _http(self, path: str, body: dict[str, Any]) -> None:
        reply = await self._exchange(request_bytes("POST", path, body))
        assert reply is not None and reply.status == 200, (path, body, reply)
        if body.get("stream") and path != "/v1/messages":
            answer: Any = _joined(reply.events())
        elif body.get("stream"):
            assert b"event: message_stop" in reply.body, reply.body[-300:]
            deltas = [json.loads(line[6:]).get("delta", {}) for line in reply.body.splitlines() if line[:5] == b"data:"]
            answer = ["".join(delta.get("text", "") for delta in deltas), deltas[-2]["stop_reason"]]
        else:
            answer = _without_ids(reply.json())
        self._same((path, body), answer)

    async def _broken_http(self) -> None:
        if self._random.random() < 0.3:
            reply = await self._exchange(self._random.choice(BROKEN_BYTES))
            assert reply is None or 400 <= reply.status < 500, reply
            return
        path, body = self._random.choice(BROKEN_BODIES)
        reply = await self._exchange(request_bytes("POST", path, body))
        assert reply is not None and 400 <= reply.status < 500 and b'"error"' in reply.body, (path, body, reply)

    async def _exchange(self, data: bytes) -> Reply | None:
        """None when the server only hung up. A cancelled task leaves without a word."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(data)
            received = await reader.read()
            return parse_reply(received) if received else None
        finally:
            writer.transport.abort()

    # --- gRPC ---

    async def _grpc(self, kind: int, prompt: str, max_tokens: int) -> None:
        if kind == 0:
            answer = await self._stub.Tokenize(pb.TokenizeRequest(text=prompt))
            self._same(("tokenize", prompt), list(answer.token_ids))
            return
        sampling = pb.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        if kind == 2:
            sampling.prompt_logprobs = 1
        ids: dict[int, list[int]] = {}
        completed = False
        request = pb.GenerateRequest(text=prompt, sampling=sampling, n=2 if kind == 1 else 1)
        async for response in self._stub.Generate(request):
            if response.HasField("chunk"):
                ids.setdefault(response.chunk.index, []).extend(response.chunk.token_ids)
            completed = completed or response.HasField("completion")
        assert completed and all(len(tokens) == max_tokens for tokens in ids.values()), (completed, ids)
        self._same(("generate", prompt, max_tokens), ids[0])

    async def _broken_grpc(self) -> None:
        choices: list[Callable[[], Awaitable[Any]]] = [
            lambda: self._drain(pb.GenerateRequest()),
            lambda: self._drain(pb.GenerateRequest(text="a", sampling=pb.SamplingParams(temperature=-1.0))),
            lambda: self._drain(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[9999]))),
            lambda: self._stub.Detokenize(pb.DetokenizeRequest(token_ids=[70000])),
            lambda: self._stub.Abort(pb.AbortRequest(request_id="no hex")),
        ]
        try:
            await self._random.choice(choices)()
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
        else:
            raise AssertionError("not refused")

    async def _drain(self, request: pb.GenerateRequest) -> None:
        async for _ in self._stub.Generate(request):
            pass

    def _same(self, request: Any, answer: Any) -> None:
        assert self._answers.setdefault(json.dumps(request), answer) == answer, request


def _joined(events: list[dict[str, Any]]) -> list[Any]:
    """A stream's text and ends: how it is cut into chunks may differ."""
    parts: dict[int, list[Any]] = {}
    for event in events:
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            part = parts.setdefault(choice["index"], ["", None])
            part[0] += text
            part[1] = choice["finish_reason"] or part[1]
    return [parts[index] for index in sorted(parts)]


def _without_ids(answer: Any) -> Any:
    """What does not differ from one time to the next; of numbers, what batches round differently is left out."""
    if isinstance(answer, dict):
        left_out = {"id", "created", "created_at", "completed_at", "item_id", "usage", "logprobs", "call_id"}
        return {name: _without_ids(value) for name, value in answer.items() if name not in left_out}
    return [_without_ids(item) for item in answer] if isinstance(answer, list) else answer
