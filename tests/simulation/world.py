"""Virtual time: a queue of events, one generator for every choice, and a record of it all."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

START_S = 1000.0  # a clock that began at 0 would hide a confusion of times and durations


class SimulationError(AssertionError):
    """What must not happen has happened."""


class World:
    """Owns the clock, the events to come, and chance."""

    def __init__(self, seed: int, show: Callable[[str], None] | None = None) -> None:
        """`show` gets each line of the record."""
        self.now = START_S
        self.chance = random.Random(seed)
        self.num_events = 0
        self._show = show
        self._num_added = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def clock(self) -> float:
        return self.now

    def at(self, moment: float, event: Callable[[], None]) -> None:
        """Have something happen; not before what was added before for the same moment."""
        self._num_added += 1
        heapq.heappush(self._events, (max(moment, self.now), self._num_added, event))

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        self.at(self.now + delay_s, event)

    def run_until(self, moment: float) -> None:
        """Let everything happen that is due by then."""
        while self._events and self._events[0][0] <= moment:
            self.now, _, event = heapq.heappop(self._events)
            self.num_events += 1
            event()
        self.now = max(self.now, moment)

    def note(self, who: str, what: str, *details: object) -> None:
        """A line of the record. Details are made into text only when somebody looks."""
        if self._show is not None:
            text = " ".join(str(detail) for detail in details)
            self._show(f"{self.now - START_S:9.4f} {who:>14} {what} {text}".rstrip())


class Alarm:
    """Calls `ring` at the earliest moment it was set to, and then forgets it."""

    def __init__(self, world: World, ring: Callable[[], None]) -> None:
        self._world = world
        self._ring = ring
        self._at: float | None = None
        self._number = 0

    def set_by(self, moment: float) -> None:
        """Ring at this moment or before."""
        if self._at is None or moment < self._at:
            self._at = moment
            self._number += 1
            number = self._number
            self._world.at(moment, lambda: self._due(number))

    def set_at(self, moment: float) -> None:
        """Ring at this moment, whatever it was set to before."""
        self.cancel()
        self.set_by(moment)

    def cancel(self) -> None:
        self._at = None
        self._number += 1

    def _due(self, number: int) -> None:
        if number == self._number:
            self._at = None
            self._ring()
