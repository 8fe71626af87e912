"""Who may use the API: keys, known by their hashes only."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from quartet.services.gateway.events import RETRY_AFTER_MS, StreamError
from quartet.shared.messages import ErrorCode

MAX_KEY_BYTES = 512
_ENTRY = re.compile(r"(?:([A-Za-z0-9_.@-]{1,64})[=:])?([0-9a-fA-F]{64})")


class ApiKey:
    """A key, or whoever asks where none is needed. `open` counts its running requests."""

    def __init__(self, name: str = "", digest: bytes = b"") -> None:
        self.name = name
        self.digest = digest
        self.open = 0


class ApiKeys:
    """Without any entry everybody is let in. `max_open` bounds each key's running requests; 0: no bound."""

    def __init__(self, entries: Iterable[str] = (), max_open: int = 0) -> None:
        """`entries`: "sha256" or "name=sha256" in hex. Raises ValueError."""
        self._keys = [_parse(entry) for entry in entries]
        self._everybody = ApiKey()
        self._max_open = max_open

    def replace(self, entries: Iterable[str]) -> None:
        """What a key that stays has running is still counted. Raises ValueError, and changes nothing then."""
        former = {(key.name, key.digest): key for key in self._keys}
        new = [_parse(entry) for entry in entries]
        self._keys = [former.get((key.name, key.digest), key) for key in new]

    @property
    def required(self) -> bool:
        return bool(self._keys)

    def find(self, authorization: str | None) -> ApiKey | None:
        """The key in "Bearer KEY"; None when it is none of ours."""
        if not self._keys:
            return self._everybody
        scheme, _, key = (authorization or "").partition(" ")
        digest = hash_key(key.strip()[:MAX_KEY_BYTES]) if scheme.lower() == "bearer" else b""
        found = None
        for known in self._keys:  # all of them: how long it takes tells nothing
            if hmac.compare_digest(known.digest, digest):
                found = known
        return found

    @contextlib.contextmanager
    def running(self, key: ApiKey, count: int, refused: Callable[[int], None]) -> Iterator[None]:
        """While `count` streams of the key run. Raises StreamError when those would be too many, and tells `refused`
        how many."""
        if key is not self._everybody and self._max_open and key.open + count > self._max_open:
            refused(count)
            raise StreamError(
                ErrorCode.RESOURCE_EXHAUSTED,
                f"max_requests_per_key: {key.open} requests of this key are running, {self._max_open} may",
                retry_after_ms=RETRY_AFTER_MS,
            )
        key.open += count
        try:
            yield
        finally:
            key.open -= count


def hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_key_file(path: str) -> list[str]:
    """One entry a line; empty lines and those with # are skipped. Raises OSError, UnicodeDecodeError."""
    lines = (line.strip() for line in Path(path).read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _parse(entry: str) -> ApiKey:
    match = _ENTRY.fullmatch(entry.strip())
    if match is None:
        raise ValueError(
            f"an entry is the sha256 of a key in hex, or NAME=sha256 (see quartet keys api), got {entry[:20]!r}"
        )
    name, digest = match[1] or f"key-{match[2][:8].lower()}", bytes.fromhex(match[2])
    return ApiKey(name, digest)
