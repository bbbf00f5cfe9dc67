"""When a worker that was told to go may leave. Pure.

    SIGTERM ──► draining, and the coordinator hears it ──► Drain: nothing more will come ──► leave
                                                                                     when idle

Whoever drains takes nothing new. A Drain without a SIGTERM before it is the same from there on.
"""

from __future__ import annotations

DRAIN_MARGIN_S = 30.0  # behind the grace of the cluster, when no Drain comes


class Draining:
    """Owns whether this worker drains, and by when it is gone."""

    def __init__(self, grace_s: float = 30.0) -> None:
        """`grace_s` is how long a worker that leaves may keep its streams."""
        self._limit_s = grace_s + DRAIN_MARGIN_S
        self.started = False
        self.due = float("inf")
        self._nothing_more_comes = False

    def signalled(self, now: float) -> None:
        """SIGTERM: finish what is here, and what was sent here before the coordinator knew."""
        if not self.started:
            self.started = True
            self.due = now + self._limit_s

    def told(self, deadline_s: float, now: float) -> None:
        """Drain: the coordinator sends nothing any more."""
        self.started = True
        self._nothing_more_comes = True
        self.due = now + deadline_s

    def over(self, idle: bool, connected: bool, now: float) -> bool:
        """Whether to leave now. Without a coordinator nobody waits for what is here."""
        if not self.started:
            return False
        return (idle and self._nothing_more_comes) or not connected or now >= self.due
