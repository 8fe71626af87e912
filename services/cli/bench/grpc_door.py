"""Requests through Quartet's own client."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import grpc

from quartet.services.cli.bench.record import Prompt, Record
from quartet.shared.client import AsyncClient


@dataclasses.dataclass(frozen=True)
class GrpcDoor:
    """`sampling` are options of every request."""

    client: AsyncClient
    sampling: dict[str, Any]

    async def send(self, prompt: Prompt, output_tokens: int, keep_answer: bool = False) -> Record:
        record = Record(time.perf_counter())
        given: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"token_ids": prompt}
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            given = {"messages": prompt}
        generation = self.client.generate(**given, max_tokens=output_tokens, **self.sampling)
        times: Any = record.times
        texts = []
        try:
            async for chunk in generation:
                if chunk.token_ids:
                    times.append(time.perf_counter())
                    record.output_tokens += len(chunk.token_ids)
                    if keep_answer:
                        record.answer_ids += chunk.token_ids
                if keep_answer:
                    texts.append(chunk.text)
        except grpc.RpcError as error:
            record.fail(error.code().name, error.details() or "")
        except (ValueError, TypeError) as error:
            record.fail("invalid request", str(error))
        record.ended = time.perf_counter()
        record.answer_text = "".join(texts)
        if generation.usage is not None:
            record.prompt_tokens, record.output_tokens, record.cached_tokens = generation.usage
        if not record.error and not record.times:
            record.fail("empty answer", "the stream ended without a token")
        return record
