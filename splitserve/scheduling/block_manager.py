"""The KV blocks of one worker: who holds which, counted so that they always add up.

         allocate                     free (last reference)
free ───────────────► used ──────────────────────────► free
  │  reserve     commit ▲
  └────────► reserved ──┘         reserved ── cancel ──► free
                │ quarantine                               ▲
                └──────────► quarantined ── end_quarantine ┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many blocks are in each state; free, used and reserved add up to `total`."""

    total: int
    free: int
    used: int
    reserved: int
    quarantined: int  # these are among the reserved ones


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class BlockManager:
    """Owns the free list. Every block is in exactly one state: free, reserved, or used."""

    def __init__(self, num_blocks: int) -> None:
        self._free: deque[int] = deque(range(num_blocks))
        self._references = [0] * num_blocks
        self._reserved: dict[Hashable, list[int]] = {}
        self._quarantined: dict[Hashable, list[int]] = {}
        self._num_reserved = 0  # with the quarantined ones
        self._num_quarantined = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def counts(self) -> BlockCounts:
        total = len(self._references)
        used = total - len(self._free) - self._num_reserved
        return BlockCounts(total, len(self._free), used, self._num_reserved, self._num_quarantined)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None: all or nothing."""
        block_ids = self._take(count)
        for block_id in block_ids or ():
            self._references[block_id] = 1
        return block_ids

    def fork(self, block_ids: Sequence[int]) -> None:
        """Add a reference to blocks in use: a second sequence reads them."""
        for block_id in block_ids:
            assert self._references[block_id] > 0, f"block {block_id} is not in use"
            self._references[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each; a block with none left is free."""
        for block_id in block_ids:
            assert self._references[block_id] > 0, f"block {block_id} freed twice"
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._free.append(block_id)

    def reserve(self, key: Hashable, count: int) -> list[int] | None:
        """Set `count` blocks aside for a transfer, or None: all or nothing."""
        assert key not in self._reserved, f"{key} reserved twice"
        block_ids = self._take(count)
        if block_ids is not None:
            self._reserved[key] = block_ids
            self._num_reserved += count
        return block_ids

    def commit(self, key: Hashable) -> list[int]:
        """Reserved blocks become used, with one reference each."""
        block_ids = self._reserved.pop(key)
        self._num_reserved -= len(block_ids)
        for block_id in block_ids:
            self._references[block_id] = 1
        return block_ids

    def cancel(self, key: Hashable) -> None:
        """Reserved blocks become free. The caller has made sure that nothing writes to them."""
        block_ids = self._reserved.pop(key)
        self._num_reserved -= len(block_ids)
        self._free.extend(block_ids)

    def quarantine(self, key: Hashable, writer: Hashable) -> None:
        """Reserved blocks stay out of use: `writer` is given up, and may still write to them."""
        block_ids = self._reserved.pop(key)
        self._num_quarantined += len(block_ids)
        self._quarantined.setdefault(writer, []).extend(block_ids)

    def end_quarantine(self, writer: Hashable) -> None:
        """What `writer` might have written to is free: it has ended. Unknown ones are fine."""
        block_ids = self._quarantined.pop(writer, [])
        self._num_quarantined -= len(block_ids)
        self._num_reserved -= len(block_ids)
        self._free.extend(block_ids)

    def check(self) -> None:
        """AssertionError unless every block is in exactly one state."""
        used = [b for b, count in enumerate(self._references) if count > 0]
        quarantined = [b for ids in self._quarantined.values() for b in ids]
        reserved = [b for ids in self._reserved.values() for b in ids] + quarantined
        everyone = sorted([*self._free, *used, *reserved])
        assert everyone == list(range(len(self._references))), "a block is lost or held twice"
        assert self._num_reserved == len(reserved)
        assert self._num_quarantined == len(quarantined)
        assert all(count >= 0 for count in self._references)

    def _take(self, count: int) -> list[int] | None:
        if count > len(self._free):
            return None
        return [self._free.popleft() for _ in range(count)]
