"""A tokenizer's end of the link, as the gateway's core sees it."""

from __future__ import annotations

from typing import Protocol

from quartet.shared.messages import Message, ModelInfo


class Peer(Protocol):
    """What the core needs of a link's peer; a new session is a new one."""

    name: str
    version: str
    model: ModelInfo | None
    tokenizer_fingerprint: str
    alive: bool
    ready: bool
    draining: bool
    stalled: bool

    def send(self, message: Message) -> bool: ...
