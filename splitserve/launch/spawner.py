"""What starts and stops processes somewhere, and how it tells the launcher what happened."""

from __future__ import annotations

import collections
import contextlib
import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass

from splitserve.launch.child import Exited
from splitserve.launch.plan import WorkerPlace

COORDINATOR = "coordinator"  # the coordinator's launch_id


@dataclass(frozen=True, slots=True)
class CoordinatorUp:
    """The coordinator has bound its control socket."""

    control_endpoint: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Whoever owns the cluster wants it to end."""


Event = CoordinatorUp | Exited | StopRequested


class Inbox:
    """Events from other threads, and a descriptor that is readable while there are some."""

    def __init__(self) -> None:
        self._events: collections.deque[Event] = collections.deque()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def post(self, event: Event) -> None:
        """Callable from any thread and from a signal handler."""
        self._events.append(event)
        with contextlib.suppress(OSError):  # full: it is readable already; closed: nobody reads
            self._writer.send(b"x")

    def fileno(self) -> int:
        return self._reader.fileno()

    def take(self) -> list[Event]:
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass
        return [self._events.popleft() for _ in range(len(self._events))]

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class Spawner(ABC):
    """Starts and stops processes somewhere. Called on the launcher's thread, save `kill_all`.

    It posts CoordinatorUp, and Exited once for each process, into the inbox it was given.
    """

    @abstractmethod
    def start_coordinator(self, inbox: Inbox) -> None:
        """Start the coordinator. Raises LaunchError."""

    @abstractmethod
    def start(self, place: WorkerPlace, control_endpoint: str) -> None:
        """Start a worker. Raises LaunchError."""

    @abstractmethod
    def stop(self, launch_id: str, grace_s: float) -> None:
        """Ask a worker to end, and make it end after the grace. Returns at once."""

    @abstractmethod
    def close(self, grace_s: float) -> None:
        """Stop the workers, then the coordinator; return when all are reaped."""

    @abstractmethod
    def kill_all(self) -> None:
        """End everything at once. Callable from any thread."""
