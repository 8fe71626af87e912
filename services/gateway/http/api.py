"""What every endpoint shares: the table, the limits, the model's names, and how a generation runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from quartet.services.gateway.api_keys import ApiKeys
from quartet.services.gateway.ask import ask
from quartet.services.gateway.calls import Answer
from quartet.services.gateway.choice import Choice
from quartet.services.gateway.events import StreamError
from quartet.services.gateway.group import Group
from quartet.services.gateway.http.errors import ApiError, invalid
from quartet.services.gateway.http.exchange import Exchange
from quartet.services.gateway.http.params import Params
from quartet.services.gateway.settings import GatewaySettings
from quartet.services.gateway.stream import Stream
from quartet.services.gateway.stream_table import StreamTable
from quartet.shared.messages import Encode, Encoded, Message, ModelInfo, Prompt, TokensPrompt
from quartet.shared.metrics import Collector
from quartet.shared.sampling_params import RequestLimits, ToolParams

A = TypeVar("A", bound=Answer)


class Api:
    """One for all requests."""

    def __init__(self, table: StreamTable, settings: GatewaySettings, keys: ApiKeys) -> None:
        self.table = table
        self.settings = settings
        self.keys = keys
        self.limits: RequestLimits = settings.request_limits
        self.started_at = int(time.time())
        self.collector: Collector | None = None
        self._last_model: ModelInfo | None = None

    async def ask(self, kind: type[A], make: Callable[[int], Message]) -> A:
        """A call to a tokenizer. Raises StreamError."""
        return await ask(self.table.calls, kind, make, self.settings.call_timeout)

    def model(self, wanted: str | None) -> tuple[str, ModelInfo]:
        """The public name and the model. Raises ApiError for another one, StreamError before there is one."""
        model = self._known_model()
        names = self.model_names(model)
        if not wanted:
            return names[0], model
        if wanted not in names:
            message = f"model: {wanted[:200]!r} is not served here; {' and '.join(names)} is"
            raise ApiError(404, message, param="model", code="model_not_found")
        return wanted, model

    def _known_model(self) -> ModelInfo:
        """The last one stands while there is no tokenizer: requests wait for the next one, as open streams do."""
        try:
            self._last_model, _ = self.table.model()
        except StreamError:
            if self._last_model is None:
                raise
        return self._last_model

    def model_names(self, model: ModelInfo) -> list[str]:
        return self.settings.served_model_names or [model.name]

    async def truncate(
        self, prompt: Prompt, length: int, params: Params, model: ModelInfo, tools: ToolParams | None = None
    ) -> Prompt:
        """The prompt's last `length` tokens. Raises ApiError and StreamError."""
        if length == -1:
            length = max(1, model.max_model_len - max(1, params.sampling.max_tokens or 1))
        if not 1 <= length <= model.max_model_len:
            raise invalid("truncate_prompt_tokens", f"must be between 1 and {model.max_model_len}, or -1, got {length}")
        if isinstance(prompt, TokensPrompt):
            token_ids = prompt.token_ids
        else:
            token_ids = (await self.ask(Encoded, lambda call_id: Encode(call_id, prompt, tools))).token_ids
        return TokensPrompt(token_ids[-length:])

    @contextlib.contextmanager
    def generating(
        self, exchange: Exchange, prompts: list[Prompt], params: Params, tools: ToolParams | None = None
    ) -> Iterator[Group]:
        """The prompts' streams, which end with this. An error is about its prompt where there are several.
        Raises StreamError."""
        group = Group(self.table)
        try:
            with self.keys.running(exchange.key, len(prompts), self.table.metrics.rejected):
                group.open([_maker(prompt, params, tools) for prompt in prompts])
                yield group
        except StreamError:
            if len(prompts) > 1 and group.failed is not None:
                name = f"prompt[{group.failed}]"
                exchange.fields |= {"prompt": name, "prompt_token_ids": name}
            raise
        finally:
            group.close()


def _maker(prompt: Prompt, params: Params, tools: ToolParams | None) -> Callable[[int], Stream]:
    def make(request_id: int) -> Stream:
        return Stream(
            request_id,
            prompt,
            params.seed(),
            params.text,
            [Choice(index) for index in range(params.n)],
            priority=params.priority,
            cache_salt=params.cache_salt,
            tenant=params.tenant,
            tools=tools,
            read_prefix_cache=params.read_prefix_cache,
            write_prefix_cache=params.write_prefix_cache,
        )

    return make


def head(identifier: str, kind: str, name: str, fingerprint: str) -> dict[str, Any]:
    """What every answer and every chunk of it begins with."""
    return {
        "id": identifier,
        "object": kind,
        "created": int(time.time()),
        "model": name,
        "system_fingerprint": f"fp_{fingerprint[:12]}",
    }
