"""What starts and stops processes somewhere, and how it tells the launcher what happened."""

from __future__ import annotations

import collections
from abc import ABC, abstractmethod
from dataclasses import dataclass

from splitserve.launch.child import Exited
from splitserve.launch.plan import Comeback, WorkerPlace
from splitserve.wire.waker import Waker

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
        self._waker = Waker()

    def post(self, event: Event) -> None:
        """Callable from any thread and from a signal handler."""
        self._events.append(event)
        self._waker.wake()

    def fileno(self) -> int:
        return self._waker.fd

    def take(self) -> list[Event]:
        self._waker.clear()
        return [self._events.popleft() for _ in range(len(self._events))]

    @property
    def asked_to_stop(self) -> bool:
        """Whether a StopRequested waits, for who has to wait for something else."""
        return any(isinstance(event, StopRequested) for event in list(self._events))

    def close(self) -> None:
        self._waker.close()


class Spawner(ABC):
    """Starts and stops processes somewhere. Called on the launcher's thread, save `kill_all`.

    It posts CoordinatorUp, and Exited once for each process, into the inbox it was given.
    """

    @abstractmethod
    def start_coordinator(self, inbox: Inbox, comeback: Comeback | None) -> None:
        """Start the coordinator: the first one, or one that replaces a dead one, which was
        reaped. Raises LaunchError."""

    @abstractmethod
    def kill_coordinator(self) -> None:
        """SIGKILL it. Returns at once; its exit comes to the inbox."""

    @abstractmethod
    def start(self, place: WorkerPlace, control_endpoint: str) -> None:
        """Start a worker. Raises LaunchError."""

    @abstractmethod
    def stop(self, launch_id: str, grace_s: float) -> None:
        """Ask a worker to end, and make it end after the grace. Returns at once."""

    @abstractmethod
    def close(self, grace_s: float) -> None:
        """Stop the coordinator, then the workers; return when all are reaped.

        In this order requests end with the coordinator's own clear errors, and none is given to a
        worker that leaves.
        """

    @abstractmethod
    def kill_all(self) -> None:
        """End everything at once. Callable from any thread."""
