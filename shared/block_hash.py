"""Names of full KV blocks: a chained sha256, the same in scheduler and executor.

block_hash = sha256(parent_block_hash ‖ token ids as little-endian u32). The first block's parent is
`hash_root(extra_keys)`, where the extra keys (cache salt, adapter, ...) are typed and
length-prefixed, so that no two different sets of keys can run together.
"""

from __future__ import annotations

import array
import hashlib
import sys
from collections.abc import Sequence

HASH_BYTES = 32


def hash_root(extra_keys: Sequence[tuple[str, str]] = ()) -> bytes:
    """The parent hash of a chain's first block. `extra_keys`: (type, value) pairs; order does not count."""
    digest = hashlib.sha256(b"quartet.block_hash.1")
    for kind, value in sorted(extra_keys):
        for part in (kind.encode(), value.encode()):
            digest.update(len(part).to_bytes(4, "little"))
            digest.update(part)
    return digest.digest()


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Ids as a little-endian u32 column."""
    column = array.array("I", token_ids)
    if sys.byteorder != "little":
        column.byteswap()
    return column.tobytes()


def block_hash(parent_block_hash: bytes, packed_token_ids: bytes) -> bytes:
    """`packed_token_ids`: exactly one block's ids, as pack_token_ids gives them."""
    return hashlib.sha256(parent_block_hash + packed_token_ids).digest()
