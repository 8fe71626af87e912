"""The tokenizers that are there, as the ledger sees them."""

from __future__ import annotations

from typing import Protocol

from quartet.services.gateway.stream import Stream
from quartet.shared.messages import Message, ModelInfo


class Peer(Protocol):
    """What the core needs of a link's peer; a new session is a new one."""

    name: str
    incarnation: int
    version: str
    model: ModelInfo | None
    tokenizer_fingerprint: str
    alive: bool
    ready: bool
    draining: bool
    stalled: bool

    def send(self, message: Message) -> bool: ...


class Tokenizer:
    """A tokenizer that is there, and the streams that it works on."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.streams: dict[int, Stream] = {}
        self.stalled_since: float | None = None

    @property
    def usable(self) -> bool:
        """Takes new work."""
        peer = self.peer
        return peer.alive and peer.ready and not peer.draining and not peer.stalled

    @property
    def fingerprints(self) -> tuple[str, str]:
        model = self.peer.model
        return ("" if model is None else model.model_fingerprint, self.peer.tokenizer_fingerprint)

    @property
    def known_fingerprints(self) -> tuple[str, str] | None:
        """None while it has no model: what is bound to that could go nowhere else."""
        return None if self.peer.model is None else self.fingerprints
