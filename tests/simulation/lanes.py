"""One direction of one connection: what is sent comes in order, after a while."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from tests.simulation.world import Alarm, World

T = TypeVar("T")
LATENCIES_S = (0.0, 0.0002, 0.0002, 0.001, 0.005, 0.03)


class Lane(Generic[T]):
    """Owns what is on its way. `deliver` gets it, once `ready_at` says that somebody takes it."""

    def __init__(
        self, world: World, deliver: Callable[[T], None], ready_at: Callable[[], float]
    ) -> None:
        """`ready_at`: from when on the receiver takes something; infinite until `resume`."""
        self._world = world
        self._deliver = deliver
        self._ready_at = ready_at
        self._moving: deque[tuple[float, float, T]] = deque()  # with arrival and departure
        self._last_arrival = 0.0
        self._alarm = Alarm(world, self._arrive)

    def __len__(self) -> int:
        return len(self._moving)

    def send(self, item: T, departs_at: float) -> None:
        arrival = departs_at + self._world.chance.choice(LATENCIES_S)
        self._last_arrival = max(self._last_arrival, arrival)
        self._moving.append((self._last_arrival, departs_at, item))
        self._alarm.set_by(self._moving[0][0])

    def resume(self) -> None:
        """The receiver is there again."""
        if self._moving:
            self._alarm.set_by(self._moving[0][0])

    def lose_end(self) -> None:
        """The sender is gone: what it sent last may never have left."""
        num_left = sum(departure <= self._world.now for _, departure, _ in self._moving)
        kept = self._world.chance.randint(0, num_left)
        self._moving = deque(list(self._moving)[:kept])

    def lose_beginning(self) -> None:
        """The receiver is gone: what it had not read is lost, the rest waits for the next one."""
        lost = self._world.chance.randint(0, len(self._moving))
        self._moving = deque(list(self._moving)[lost:])

    def lose_all(self) -> None:
        self._moving.clear()

    def _arrive(self) -> None:
        now = self._world.now
        while self._moving:
            arrival, _, item = self._moving[0]
            if arrival > now:
                self._alarm.set_by(arrival)
                return
            ready_at = self._ready_at()
            if ready_at > now:
                if ready_at < float("inf"):
                    self._alarm.set_by(ready_at)
                return
            self._moving.popleft()
            self._deliver(item)
