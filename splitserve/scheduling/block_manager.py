"""The KV blocks of one worker: who holds which, counted so that they always add up.

        allocate           free (last reference)
free ──────────────► used ──────────────────────► free, or cached if it is kept
 │ reserve   commit ▲  ▲ fork
 └──────► reserved ─┘  └──── cached ── evicted ──► free
             │ cancel
             ├──────────► free
             │ quarantine                end_quarantine
             └──────────► quarantined ──────────────────► free

Without a prefix cache no block is kept, and none is ever cached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many blocks are in each state; free, used, cached and reserved add up to `total`."""

    total: int
    free: int
    used: int
    reserved: int
    quarantined: int  # these are among the reserved ones
    cached: int  # kept for what is in them, with no reference


class Evictor(Protocol):
    """Whoever knows what is in kept blocks, and so which cached one to give up first."""

    @property
    def num_evictable(self) -> int:
        """Cached blocks that `evict` could give up, one after another."""

    def evict(self) -> int: ...
    def referenced(self, block_id: int) -> None: ...
    def unreferenced(self, block_id: int) -> None: ...
    def check(self, references: Mapping[int, int]) -> None: ...


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class BlockManager:
    """Owns the state of every block, exactly one: free, reserved, used, or cached."""

    def __init__(self, num_blocks: int) -> None:
        self._free: deque[int] = deque(range(num_blocks))
        self._references = [0] * num_blocks
        self._reserved: dict[Hashable, list[int]] = {}
        self._quarantined: dict[Hashable, list[int]] = {}
        self._num_reserved = 0  # with the quarantined ones
        self._num_quarantined = 0
        self._kept: set[int] = set()  # used ones that will be cached, and cached ones
        self._num_cached = 0
        self._evictor: Evictor | None = None

    @property
    def num_free(self) -> int:
        """How many could be had at once: the free ones, and cached ones that can be evicted."""
        num_evictable = self._evictor.num_evictable if self._evictor else 0
        return len(self._free) + num_evictable

    @property
    def counts(self) -> BlockCounts:
        total = len(self._references)
        free, reserved, cached = len(self._free), self._num_reserved, self._num_cached
        used = total - free - reserved - cached
        return BlockCounts(total, free, used, reserved, self._num_quarantined, cached)

    def attach(self, evictor: Evictor) -> None:
        """From now on blocks may be kept. Whoever is attached is told of their references."""
        assert self._evictor is None, "two caches of the same blocks"
        self._evictor = evictor

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None: all or nothing.

        Cached blocks are evicted when the free ones are too few, and only if that is enough.
        """
        block_ids = self._take(count)
        for block_id in block_ids or ():
            self._references[block_id] = 1
        return block_ids

    def fork(self, block_ids: Sequence[int]) -> None:
        """Add a reference to blocks in use or cached: one more sequence reads them."""
        for block_id in block_ids:
            self._references[block_id] += 1
            if self._references[block_id] == 1:
                self._uncache(block_id)

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each; a block with none left is cached if it is kept, else free."""
        for block_id in block_ids:
            assert self._references[block_id] > 0, f"block {block_id} freed twice"
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._unreferenced(block_id)

    def keep(self, block_id: int) -> None:
        """A block in use will be cached, not free, when its last reference goes."""
        assert self._references[block_id] > 0, f"block {block_id} is not in use"
        assert block_id not in self._kept, f"block {block_id} is kept twice"
        self._kept.add(block_id)

    def keep_none(self) -> None:
        """Cached blocks become free, and those in use will be: what was in them is forgotten."""
        self._free.extend(b for b in sorted(self._kept) if self._references[b] == 0)
        self._kept.clear()
        self._num_cached = 0

    def reserve(self, key: Hashable, count: int) -> list[int] | None:
        """Set `count` blocks aside for a transfer, or None: all or nothing, as in `allocate`."""
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
        cached = [b for b in self._kept if self._references[b] == 0]
        everyone = sorted([*self._free, *used, *reserved, *cached])
        assert everyone == list(range(len(self._references))), "a block is lost or held twice"
        assert self._num_reserved == len(reserved)
        assert self._num_quarantined == len(quarantined)
        assert self._num_cached == len(cached)
        assert all(count >= 0 for count in self._references)
        if self._evictor is not None:
            self._evictor.check({block_id: self._references[block_id] for block_id in self._kept})

    def _unreferenced(self, block_id: int) -> None:
        if block_id not in self._kept:
            self._free.append(block_id)
            return
        assert self._evictor is not None
        self._num_cached += 1
        self._evictor.unreferenced(block_id)

    def _uncache(self, block_id: int) -> None:
        assert block_id in self._kept, f"block {block_id} is not in use"
        assert self._evictor is not None
        self._num_cached -= 1
        self._evictor.referenced(block_id)

    def _take(self, count: int) -> list[int] | None:
        if count > self.num_free:
            return None
        while len(self._free) < count:
            self._evict_one()
        return [self._free.popleft() for _ in range(count)]

    def _evict_one(self) -> None:
        assert self._evictor is not None
        block_id = self._evictor.evict()
        self._kept.remove(block_id)
        self._num_cached -= 1
        self._free.append(block_id)
