"""A call to a tokenizer, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from quartet.services.gateway.calls import Answer, Calls
from quartet.services.gateway.events import StreamError
from quartet.shared.messages import ErrorCode, Message

A = TypeVar("A", bound=Answer)


async def ask(calls: Calls, kind: type[A], make: Callable[[int], Message], timeout: float) -> A:
    """The answer to make(call_id), which is a `kind`. Raises StreamError, also when none comes in `timeout` seconds."""
    future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def done(answer: Answer | StreamError) -> None:
        if future.done():
            return
        if isinstance(answer, StreamError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    call_id = calls.start(make, done)
    try:
        async with asyncio.timeout(timeout):
            answer = await future
    except TimeoutError:
        raise StreamError(ErrorCode.UNAVAILABLE, f"no answer within {timeout:g} s") from None
    finally:
        calls.drop(call_id)
    if not isinstance(answer, kind):
        raise StreamError(ErrorCode.INTERNAL, f"a tokenizer answered with {type(answer).__name__}")
    return answer
