"""What changed in a worker's prefix cache, numbered, for a router that follows it.

A reader names the number of the last event it has applied, and gets those behind it. The log is
bounded: a reader that fell behind, or that read another log, starts anew with a list of what is
there, which is written as events too: everything cleared, then each block stored, parents first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block is in the cache, behind its parent. Keys are those of prefix_key."""

    key: bytes
    parent_key: bytes


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block was evicted. None was behind it."""

    key: bytes


@dataclass(frozen=True, slots=True)
class AllCleared:
    """Nothing is in the cache."""


KVEvent = BlockStored | BlockRemoved | AllCleared


class KVEvents(NamedTuple):
    """Events to apply in order; the reader has then seen those up to number `last`."""

    last: int
    events: tuple[KVEvent, ...]


class KVEventLog:
    """Owns the latest events of one cache; the first of all has number 1."""

    def __init__(self, capacity: int) -> None:
        self._events: deque[KVEvent] = deque(maxlen=capacity)
        self.last = 0

    def append(self, event: KVEvent) -> None:
        self._events.append(event)
        self.last += 1

    def since(self, number: int) -> KVEvents | None:
        """Events behind `number`, or None when they are not all here or it is not of this log."""
        num_gone = self.last - len(self._events)
        if not num_gone <= number <= self.last:
            return None
        return KVEvents(self.last, tuple(islice(self._events, number - num_gone, None)))
