"""How often, and how soon, what has died is started again."""

from __future__ import annotations

import collections


class RestartPolicy:
    """Owns the record of one process's failures. Pure: the clock is an argument."""

    def __init__(
        self,
        max_restarts: int = 5,
        window_s: float = 300.0,
        first_delay_s: float = 0.5,
        max_delay_s: float = 10.0,
    ) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._first_delay_s = first_delay_s
        self._max_delay_s = max_delay_s
        self._failures: collections.deque[float] = collections.deque()  # those in the window
        self._delay_s = first_delay_s

    @property
    def num_recent(self) -> int:
        """Failures that were in the window at the last one, itself included."""
        return len(self._failures)

    def next_delay(self, now: float) -> float | None:
        """Record a failure; how long to wait before the restart, or None: give it up.

        The wait doubles from failure to failure until one comes after a quiet window.
        """
        while self._failures and now - self._failures[0] >= self._window_s:
            self._failures.popleft()
        if not self._failures:
            self._delay_s = self._first_delay_s
        self._failures.append(now)
        if len(self._failures) > self._max_restarts:
            return None
        delay_s = self._delay_s
        self._delay_s = min(2 * delay_s, self._max_delay_s)
        return delay_s
