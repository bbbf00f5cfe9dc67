"""What a decode worker remembers of requests that are over here. Pure.

A hand-off and its release come from two sides, so either may be first. Without this memory an Open
that comes after its Release would be granted, and hold blocks that nobody asks for any more.
"""

from __future__ import annotations

from typing import NamedTuple

from splitserve.scheduling.sequence import RequestKey

UNKNOWN_DEADLINE_S = 600.0  # how long to remember a request whose deadline nobody here knows
MAX_TOMBSTONES = 100_000


class _Tombstone(NamedTuple):
    attempt: int  # this one and all before it
    until: float


class Tombstones:
    """Owns the highest attempt that is over, for each request that may still be heard of."""

    def __init__(self, max_tombstones: int = MAX_TOMBSTONES) -> None:
        self._max = max_tombstones
        self._tombstones: dict[str, _Tombstone] = {}  # in order of the last burial

    def __len__(self) -> int:
        return len(self._tombstones)

    def bury(self, key: RequestKey, until: float, now: float) -> None:
        """From now until `until` nothing of this attempt, or of one before it, is taken."""
        old = self._tombstones.pop(key.request_id, _Tombstone(-1, now))
        attempt = max(old.attempt, key.attempt)
        self._tombstones[key.request_id] = _Tombstone(attempt, max(old.until, until))
        self._sweep(now)

    def cover(self, key: RequestKey, now: float) -> bool:
        """Whether this attempt is over."""
        tombstone = self._tombstones.get(key.request_id)
        return tombstone is not None and key.attempt <= tombstone.attempt and now < tombstone.until

    def _sweep(self, now: float) -> None:
        """Drop the oldest ones that are past, or too many. Each burial pays for its own."""
        while self._tombstones:
            request_id = next(iter(self._tombstones))
            if len(self._tombstones) <= self._max and now < self._tombstones[request_id].until:
                return
            del self._tombstones[request_id]
