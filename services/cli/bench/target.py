"""Which server is loaded, through which door, and whether it is there."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from quartet.services.cli.answer import describe
from quartet.services.cli.bench.drive import Send
from quartet.services.cli.connection import connection_of

# How long a server may take to say what it serves.
ANSWER_SECONDS = 10.0
POLL = 0.5
DEFAULT_MAX_MODEL_LEN = 2048


class TargetError(Exception):
    """One line: the server is not there, or does not let us in."""


class Target(NamedTuple):
    """`facts` are for the report. Token ids may be drawn from [low, high)."""

    send: Send
    facts: dict[str, Any]
    max_model_len: int = DEFAULT_MAX_MODEL_LEN
    low: int = 1000
    high: int = 30000


@contextlib.asynccontextmanager
async def target(options: argparse.Namespace) -> AsyncIterator[Target]:
    """Raises TargetError."""
    async with (_over_http if options.url else _over_grpc)(options) as found:
        yield found


@contextlib.asynccontextmanager
async def _over_grpc(options: argparse.Namespace) -> AsyncIterator[Target]:
    try:
        import grpc

        from quartet.services.cli.bench.grpc_door import GrpcDoor
        from quartet.shared.client import AsyncClient
    except ImportError as error:
        raise TargetError(f"{error}; run: pip install 'quartet[client]'") from None
    key = os.environ.get("QUARTET_API_KEY", "")
    try:
        client = AsyncClient(**connection_of(options), api_key=key)
    except ValueError as error:
        raise TargetError(str(error)) from None
    async with client:

        async def ask() -> Any:
            try:
                return await asyncio.wait_for(client.model_info(), ANSWER_SECONDS)
            except TimeoutError:
                raise TargetError(f"no answer from {options.address} within {ANSWER_SECONDS:g} s") from None
            except grpc.RpcError as error:
                raise TargetError(_with_key(describe(error, options.address), key, "QUARTET_API_KEY")) from None

        info = await _patiently(ask, options.wait)
        sampling = {
            "temperature": options.temperature,
            "ignore_eos": options.ignore_eos,
            "seed": options.seed,
            "timeout": options.timeout,
        }
        facts = {
            "backend": "grpc",
            "base_url": options.address,
            "model_id": info.name,
            "dtype": info.dtype,
            "device": info.device,
        }
        # Special ids are at one of the vocabulary's ends.
        low, high = min(1000, info.vocab_size // 4), max(1, info.vocab_size * 3 // 4)
        yield Target(GrpcDoor(client, sampling).send, facts, info.max_model_len, low, high)


@contextlib.asynccontextmanager
async def _over_http(options: argparse.Namespace) -> AsyncIterator[Target]:
    try:
        from quartet.services.cli.bench import http_door
    except ImportError as error:
        raise TargetError(f"{error}; run: pip install 'quartet[bench]'") from None
    key = os.environ.get("QUARTET_API_KEY") or os.environ.get("OPENAI_API_KEY", "")
    base = options.url.rstrip("/").removesuffix("/v1") + "/v1"
    async with http_door.session(key, options.timeout) as session:

        async def ask() -> list[dict[str, Any]]:
            try:
                return await http_door.list_models(session, base, ANSWER_SECONDS)
            except http_door.RefusedError as error:
                raise TargetError(_with_key(str(error), key, "OPENAI_API_KEY")) from None

        models = await _patiently(ask, options.wait)
        names = [str(model["id"]) for model in models]
        if not names:
            raise TargetError(f"{base} serves no model yet")
        if options.model and options.model not in names:
            raise TargetError(f"there is no model {options.model} on {base}, but {', '.join(names)}")
        name = options.model or names[0]
        about = next(model for model in models if model["id"] == name)
        extra = {"temperature": options.temperature, **options.extra}
        if options.ignore_eos:
            extra["ignore_eos"] = True
        path = "/chat/completions" if options.endpoint == "chat" else "/completions"
        door = http_door.HttpDoor(session, base + path, http_door.openai_body(options.endpoint, name, extra))
        backend = "openai-chat" if options.endpoint == "chat" else "openai"
        max_model_len = about.get("max_model_len") or DEFAULT_MAX_MODEL_LEN
        yield Target(door.send, {"backend": backend, "base_url": base, "model_id": name}, max_model_len)


async def _patiently(ask: Any, seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return await ask()
        except TargetError:
            if time.monotonic() + POLL > deadline:
                raise
        await asyncio.sleep(POLL)


def _with_key(said: str, key: str, name: str) -> str:
    if "401" not in said and "UNAUTHENTICATED" not in said:
        return said
    return f"{said} ({name} has a key that it does not take)" if key else f"{said} (set {name})"
