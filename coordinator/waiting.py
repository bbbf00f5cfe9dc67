"""The line in which requests wait for room on workers; the only place where they queue."""

from __future__ import annotations

import heapq

from coordinator.tracked import Leg
from splitserve.errors import OverloadedError

_MAX_STALE = 64  # entries of requests that left the line before their turn


class WaitingLine:
    """Owns the waiting legs: the lowest priority value first, then the oldest request.

    Nobody passes the first one, so every request gets its turn.
    """

    def __init__(self, max_queue: int) -> None:
        self._max_queue = max_queue
        self._heap: list[tuple[int, int, str]] = []
        self._waiting: dict[str, Leg] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def check_room(self, num_requests: int) -> None:
        """Raises OverloadedError when so many more can't wait here."""
        if len(self._waiting) + num_requests > self._max_queue:
            raise OverloadedError(
                f"the queue is full: {len(self._waiting)} requests wait, "
                f"{self._max_queue} may (max_queue)"
            )

    def add(self, leg: Leg) -> None:
        tracked = leg.tracked
        self._waiting[leg.leg_id] = leg
        heapq.heappush(self._heap, (tracked.request.priority, tracked.order, leg.leg_id))
        if len(self._heap) > 2 * len(self._waiting) + _MAX_STALE:
            self._heap = [entry for entry in self._heap if entry[2] in self._waiting]
            heapq.heapify(self._heap)

    def first(self) -> Leg | None:
        """Whose turn it is."""
        while self._heap:
            leg = self._waiting.get(self._heap[0][2])
            if leg is not None:
                return leg
            heapq.heappop(self._heap)  # it was removed while it waited
        return None

    def remove(self, leg_id: str) -> None:
        self._waiting.pop(leg_id, None)
