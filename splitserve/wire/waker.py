"""Waking a thread that waits in a poller. Any thread and any signal handler may wake it."""

from __future__ import annotations

import contextlib
import socket


class Waker:
    """Owns a socket pair: `fd` becomes readable when `wake` was called since the last `clear`."""

    def __init__(self) -> None:
        self._receiving, self._sending = socket.socketpair()
        self._receiving.setblocking(False)
        self._sending.setblocking(False)

    @property
    def fd(self) -> int:
        return self._receiving.fileno()

    def wake(self) -> None:
        """Never blocks; harmless after `close`."""
        # BlockingIOError: enough wake-ups are waiting. OSError: closed, there is nobody to wake.
        with contextlib.suppress(BlockingIOError, OSError):
            self._sending.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._receiving.recv(4096)

    def close(self) -> None:
        self._receiving.close()
        self._sending.close()
