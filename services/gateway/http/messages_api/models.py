"""/v1/models for clients of Anthropic's API."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import msgspec

from quartet.services.gateway.http.responses import Model


class MessagesModel(msgspec.Struct):
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int
    type: Literal["model"] = "model"
    lifecycle: Literal["active"] = "active"
    capabilities: None = None
    deprecated_at: None = None
    line: None = None
    retires_at: None = None


class MessagesModelList(msgspec.Struct):
    """All are on one page, whatever was asked for."""

    data: list[MessagesModel]
    first_id: str
    last_id: str
    has_more: bool = False


def model_body(model: Model) -> bytes:
    return msgspec.json.encode(_converted(model))


def list_body(models: list[Model]) -> bytes:
    """Of one model at least."""
    return msgspec.json.encode(
        MessagesModelList([_converted(model) for model in models], first_id=models[0].id, last_id=models[-1].id)
    )


def _converted(model: Model) -> MessagesModel:
    created_at = datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z")
    return MessagesModel(model.id, model.root or model.id, created_at, model.max_model_len, model.max_model_len)
