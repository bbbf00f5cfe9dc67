"""The line in which requests wait for room on workers; the only place where they queue."""

from __future__ import annotations

import heapq

from coordinator.tracked import Tracked
from splitserve.errors import OverloadedError

_MAX_STALE = 64  # entries of requests that left the line before their turn


class WaitingLine:
    """Owns the waiting requests: the lowest priority value first, then the oldest.

    Nobody passes the first one, so every request gets its turn.
    """

    def __init__(self, max_queue: int) -> None:
        self._max_queue = max_queue
        self._heap: list[tuple[int, int, str]] = []
        self._waiting: dict[str, Tracked] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def check_room(self, num_requests: int) -> None:
        """Raises OverloadedError when so many more can't wait here."""
        if len(self._waiting) + num_requests > self._max_queue:
            raise OverloadedError(
                f"the queue is full: {len(self._waiting)} requests wait, "
                f"{self._max_queue} may (max_queue)"
            )

    def add(self, tracked: Tracked) -> None:
        request = tracked.request
        self._waiting[request.request_id] = tracked
        heapq.heappush(self._heap, (request.priority, tracked.order, request.request_id))
        if len(self._heap) > 2 * len(self._waiting) + _MAX_STALE:
            self._heap = [entry for entry in self._heap if entry[2] in self._waiting]
            heapq.heapify(self._heap)

    def first(self) -> Tracked | None:
        """Whose turn it is."""
        while self._heap:
            tracked = self._waiting.get(self._heap[0][2])
            if tracked is not None:
                return tracked
            heapq.heappop(self._heap)  # it was removed while it waited
        return None

    def remove(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
