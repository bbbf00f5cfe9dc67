"""How many bytes wait for each peer: shared by the thread that sends and the one that does I/O."""

from __future__ import annotations

import threading


class Staging:
    """Counts buffers accepted and not yet handed to ZeroMQ, at most `budget_bytes` a peer."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = {}

    def staged_bytes(self, peer: str) -> int:
        with self._lock:
            return self._bytes.get(peer, 0)

    def add(self, peer: str, num_bytes: int) -> bool:
        """Whether they fit; nothing is counted when they don't. One buffer alone always fits."""
        with self._lock:
            staged = self._bytes.get(peer, 0)
            if staged and staged + num_bytes > self.budget_bytes:
                return False
            if num_bytes:
                self._bytes[peer] = staged + num_bytes
            return True

    def remove(self, peer: str, num_bytes: int) -> bool:
        """Whether this brought the peer from above half of the budget to half or less."""
        if not num_bytes:
            return False
        with self._lock:
            before = self._bytes.pop(peer)
            after = before - num_bytes
            assert after >= 0, f"{-after} more bytes left staging for {peer} than came in"
            if after:
                self._bytes[peer] = after
        return after <= self.budget_bytes // 2 < before
