"""Prefixes that are being computed or received right now, and for whom.

A request claims its prompt when it begins, and gives the claim back when its blocks are in the
cache or it has failed. Meanwhile whoever lacks a block that is claimed waits, then matches again.

Nobody waits in a circle. Claims have one order, that of their making. A request without a claim
holds nothing that others wait for. One with a claim is told of older claims only. So a chain of
waits leads to ever older claims, and the oldest waits for nobody; each ends by its own deadline.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Claim:
    namespace: str
    token_ids: tuple[int, ...]  # of full blocks only


class Claims:
    """Owns the claims of one worker, oldest first."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._claims: dict[Hashable, _Claim] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._claims

    def add(self, key: Hashable, token_ids: Sequence[int], namespace: str) -> None:
        assert key not in self._claims, f"{key} claims twice"
        num_full = len(token_ids) - len(token_ids) % self._block_size
        self._claims[key] = _Claim(namespace, tuple(token_ids[:num_full]))

    def release(self, key: Hashable) -> None:
        """The request has committed or failed. Unknown ones are fine."""
        self._claims.pop(key, None)

    def clear(self) -> None:
        self._claims.clear()

    def oldest_with(
        self, prefix: tuple[int, ...], namespace: str, before: Hashable | None
    ) -> Hashable | None:
        """Whose claim begins with `prefix` (whole blocks); only claims older than `before`'s."""
        start, end = len(prefix) - self._block_size, len(prefix)
        last_block = prefix[start:]
        for key, claim in self._claims.items():
            if key == before:
                return None
            # The last block first: it tells most prompts apart, and is short.
            if (
                claim.token_ids[start:end] == last_block
                and claim.namespace == namespace
                and claim.token_ids[:end] == prefix
            ):
                return key
        return None
