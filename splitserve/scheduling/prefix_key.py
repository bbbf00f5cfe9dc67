"""The name of a full block of KV: the same in every process, for the same tokens behind the same.

A block's key is a digest of its parent's key and its own tokens, so that it stands for the whole
prefix. The router compares keys; a worker compares the tokens themselves, so that an answer never
depends on a digest. Every field is tagged with its length, and each kind of key is a domain of its
own: no two different inputs are the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 16


def namespace_of(**fields: str | None) -> str:
    """One string for whatever keeps prefixes apart, such as a salt or an adapter; "" for nothing.

    Different fields never give the same string: a salt "x" is not an adapter "x".
    """
    given = sorted((name, value) for name, value in fields.items() if value is not None)
    return "".join(f"{len(name)}:{name}{len(value)}:{value}" for name, value in given)


def root_key(namespace: str = "") -> bytes:
    """The key that the first blocks of a namespace have as their parent's."""
    return blake2b(namespace.encode(), digest_size=KEY_BYTES, person=b"splitserve.root").digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a block with these tokens (32 bits each) behind its parent."""
    size, count = len(parent), len(token_ids)
    data = struct.pack(f"<I{size}sI{count}I", size, parent, count, *token_ids)
    return blake2b(data, digest_size=KEY_BYTES, person=b"splitserve.block").digest()


def prefix_keys(token_ids: Sequence[int], block_size: int, namespace: str = "") -> list[bytes]:
    """The key of each full block of a prompt, first to last."""
    keys = []
    key = root_key(namespace)
    for end in range(block_size, len(token_ids) + 1, block_size):
        key = block_key(key, token_ids[end - block_size : end])
        keys.append(key)
    return keys
