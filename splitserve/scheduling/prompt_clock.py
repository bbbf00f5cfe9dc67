"""When each prompt arrived and when its computing began, for the timing of an answer.

On a decode worker a prompt that was handed over has arrived with its Commit, and the computing is
that of its second token.
"""

from __future__ import annotations

from splitserve.scheduling.sequence import RequestKey


class PromptClock:
    """Owns two moments of each prompt that has brought no token here yet."""

    def __init__(self) -> None:
        self._arrived: dict[RequestKey, float] = {}
        self._started: dict[RequestKey, float] = {}

    def __len__(self) -> int:
        return len(self._arrived)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._arrived

    def arrived(self, key: RequestKey, now: float) -> None:
        self._arrived[key] = now

    def started(self, key: RequestKey, now: float) -> None:
        """A forward pass over the prompt begins; only the first one counts."""
        if key in self._arrived:
            self._started.setdefault(key, now)

    def finish(self, key: RequestKey, now: float) -> tuple[float, float]:
        """Seconds it waited, and seconds from its first forward pass until `now`."""
        started = self._started.pop(key)
        return started - self._arrived.pop(key), now - started

    def rename(self, old: RequestKey, new: RequestKey) -> None:
        """The prompt goes on under another key, if it is still here."""
        for moments in (self._arrived, self._started):
            if old in moments:
                moments[new] = moments.pop(old)

    def forget(self, key: RequestKey) -> None:
        self._arrived.pop(key, None)
        self._started.pop(key, None)
