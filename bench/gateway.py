"""`python -m bench.gateway`: what the gateway itself costs for each token, over gRPC and over server-sent events.

A real gateway stands between a fake tokenizer, which gives every stream a token in each step as the real one does,
and clients in a process of their own. The figure is the gateway's CPU time, from when all requests have been accepted,
by the tokens that reached the clients, in microseconds: cores may be shared. JSON goes to stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from quartet.shared.link import Identity, Peer, Status
from quartet.shared.messages import (
    Abort,
    Accepted,
    AnyMessage,
    Delta,
    Deltas,
    FinishReason,
    ModelInfo,
    Release,
    Role,
    Submit,
)
from quartet.shared.transport import Dialer, ipc_address

MODEL = ModelInfo("bench", "m", 50_000, 8192, 4096, 16, 256, 4096, "bfloat16", "cpu")
WORD = " token"
STEP = 0.02


class FakeTokenizer:
    """Gives each of its streams one token in each step."""

    def __init__(self, run_dir: str) -> None:
        identity = Identity(Role.TOKENIZER, "bench", model=MODEL, tokenizer_fingerprint="t")
        self.link = Dialer(ipc_address(run_dir, "gateway"), identity, self, lambda: Status(0, 0, True))
        self._streams: dict[int, list[int]] = {}
        self.tokens = 0

    def on_up(self, peer: Peer) -> None: ...

    def on_down(self, peer: Peer, reason: str) -> None: ...

    def on_status(self, peer: Peer) -> None: ...

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        match message:
            case Submit():
                peer.send(Accepted(message.request_id, message.attempt, [1, 2, 3, 4]))
                self._streams[message.request_id] = [message.attempt, 0, message.sampling.max_tokens or 1]
            case Abort() | Release():
                self._streams.pop(message.request_id, None)

    async def wait_for(self, num_streams: int) -> None:
        while len(self._streams) < num_streams:
            await asyncio.sleep(0.01)

    async def run(self) -> None:
        """Returns when all streams have all their tokens."""
        due = time.monotonic()
        while self._streams:
            items = []
            for request_id, state in list(self._streams.items()):
                attempt, done, wanted = state
                state[1] += 1
                finish = FinishReason.LENGTH if done + 1 == wanted else None
                total = len(WORD) * (done + 1)
                items.append(Delta(request_id, attempt, 0, done, [1000 + done % 40_000], WORD, total, None, finish))
                if finish is not None:
                    del self._streams[request_id]
            self.tokens += len(items)
            peer = self.link.peer
            assert peer is not None
            peer.send(Deltas(items))
            due += STEP
            await asyncio.sleep(max(0.0, due - time.monotonic()))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def gateway() -> AsyncIterator[tuple[int, str, str, str]]:
    """Its pid, run_dir, gRPC and HTTP addresses."""
    addresses = [f"127.0.0.1:{_free_port()}" for _ in range(2)]
    with tempfile.TemporaryDirectory(prefix="qg-") as run_dir:
        command = [sys.executable, "-m", "quartet.services.gateway", "--run-dir", run_dir, "--log-level", "error"]
        process = subprocess.Popen([*command, "--grpc-address", addresses[0], "--http-address", addresses[1]])
        try:
            yield process.pid, run_dir, *addresses
        finally:
            process.terminate()
            process.wait()


async def measure(protocol: str, num_streams: int, num_tokens: int) -> float:
    """Microseconds of the gateway's CPU for each token."""
    async with gateway() as (pid, run_dir, grpc_address, http_address):
        tokenizer = FakeTokenizer(run_dir)
        tokenizer.link.start()
        while tokenizer.link.peer is None:
            await asyncio.sleep(0.01)
        address = grpc_address if protocol == "grpc" else http_address
        arguments = [protocol, address, str(num_streams), str(num_tokens)]
        command = [sys.executable, "-m", "bench.gateway", "--client", *arguments]
        client = await asyncio.create_subprocess_exec(*command)
        await tokenizer.wait_for(num_streams)
        before = cpu_seconds(pid)
        await tokenizer.run()
        if await client.wait():
            raise SystemExit(f"the {protocol} client failed")
        cost = (cpu_seconds(pid) - before) / tokenizer.tokens * 1e6
        tokenizer.link.close()
        return cost


def run_client(protocol: str, address: str, num_streams: int, num_tokens: int) -> None:
    stream = _grpc_stream if protocol == "grpc" else _sse_stream

    async def run() -> None:
        deadline = time.monotonic() + 30
        while not _listens(address):
            if time.monotonic() > deadline:
                raise SystemExit("no gateway")
            await asyncio.sleep(0.05)
        texts = await asyncio.gather(*(stream(address, num_tokens) for _ in range(num_streams)))
        assert set(texts) == {len(WORD) * num_tokens}, texts

    asyncio.run(run())


async def _grpc_stream(address: str, num_tokens: int) -> int:
    import grpc.aio

    from quartet.shared.pb import inference_pb2 as pb
    from quartet.shared.pb import inference_pb2_grpc as pb_grpc

    # A channel each, as clients have.
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=num_tokens))
        call = pb_grpc.InferenceServiceStub(channel).Generate(request)
        return sum([len(response.chunk.text) async for response in call])


async def _sse_stream(address: str, num_tokens: int) -> int:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    message = {"role": "user", "content": "x"}
    body = json.dumps({"messages": [message], "max_tokens": num_tokens, "stream": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    data = await reader.read()
    writer.close()
    events = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
    return sum(len(event["choices"][0]["delta"].get("content") or "") for event in events)


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser("bench.gateway", description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--tokens", type=int, default=400, help="for each stream")
    parser.add_argument("--protocols", nargs="+", default=["grpc", "sse"], choices=["grpc", "sse"])
    parser.add_argument("--client", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        protocol, address, num_streams, num_tokens = arguments.client
        run_client(protocol, address, int(num_streams), int(num_tokens))
        return
    result = {}
    for protocol in arguments.protocols:
        for num_streams in arguments.streams:
            cost = asyncio.run(measure(protocol, num_streams, arguments.tokens))
            result[f"{protocol} {num_streams}"] = round(cost, 1)
            print(f"{protocol:5} {num_streams:4} streams: {cost:6.1f} us a token", file=sys.stderr)
    print(json.dumps({"gateway_us_per_token": result}))


if __name__ == "__main__":
    main()
