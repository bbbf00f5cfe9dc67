"""A worker's place in the cluster without sockets: splitserve.membership as the loops know it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from splitserve.config import Liveness
from splitserve.errors import MismatchError
from splitserve.wire import messages as m
from splitserve.wire.channel import ControlReceived
from splitserve.wire.heartbeat import EpochChanged
from splitserve.wire.parts import HEARTBEAT_SUFFIX
from tests.simulation.world import Alarm

if TYPE_CHECKING:
    from tests.simulation.process import SimProcess

DRAIN_GRACE_S = 3.0  # how long a worker that leaves may keep its streams
BEAT_SOON_S = 0.05
NEWS_EVERY_S = 1.0  # of other epochs
REMINDER_S = 5.0  # of the same one
CUT_SHARE = 0.3  # of the looks into the inbox that miss what came last


class Paused(Exception):
    """Thrown through a worker's loop when it would wait: it goes on with the next `run`."""

    def __init__(self, timeout_s: float | None) -> None:
        super().__init__(timeout_s)
        self.timeout_s = timeout_s


class SimMembership:
    """Owns a process's epoch and its heartbeat, and lets its loop turn once at a time."""

    def __init__(self, process: SimProcess, hello: m.Hello, epoch: str) -> None:
        self.worker_id = process.worker_id
        self.epoch = epoch
        self.drain_grace_s = DRAIN_GRACE_S
        self.max_step_s = Liveness().max_step_s
        self._process = process
        self._hello = hello
        self._stats = m.WorkerStats()
        self._draining = False
        self._turned = False
        self._told = ("", -float("inf"))  # of which epoch, and when
        self._beats = Alarm(process.world, self._beat)
        self._beats.set_by(process.world.now)

    # -- as the loops know it -----------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._process.connected

    def receive(self, timeout_s: float | None) -> list[object]:
        if self._turned:
            raise Paused(timeout_s)
        events = self._process.take_events(self._num_seen())
        for event in events:
            if isinstance(event, ControlReceived) and isinstance(event.message, m.Reject):
                raise MismatchError(event.message.reason)
        return events

    def turn(self, stats: m.WorkerStats) -> None:
        self._stats = stats
        self._turned = True

    def start_draining(self) -> None:
        self._draining = True
        self._beat_soon()

    def rejoin(self, held: tuple[m.Held, ...]) -> None:
        self._process.say(dataclasses.replace(self._hello, held=held))

    def welcomed(self, welcome: m.Welcome) -> bool:
        if welcome.epoch == self.epoch:
            return False
        self.epoch = welcome.epoch
        self._beat_soon()
        return True

    # -- as the simulation knows it -----------------------------------------------------------

    def begin_turn(self) -> None:
        self._turned = False

    def heard_epoch(self, epoch: str) -> None:
        """A beat was answered."""
        now = self._process.world.now
        last, told_at = self._told
        gap_s = REMINDER_S if epoch == last else NEWS_EVERY_S
        if epoch != self.epoch and now - told_at >= gap_s:
            self._told = (epoch, now)
            self._process.post(EpochChanged(epoch))

    def _num_seen(self) -> int:
        """How much of the inbox has come by now: the rest comes during the step, or behind it."""
        process = self._process
        if process.world.chance.random() >= CUT_SHARE:
            return process.num_events
        return process.world.chance.randint(0, process.num_events)

    def _beat_soon(self) -> None:
        self._beats.set_by(self._process.world.now + BEAT_SOON_S)

    def _beat(self) -> None:
        process = self._process
        if process.is_gone:
            return
        now = process.world.now
        if process.frozen_until > now:
            self._beats.set_by(process.frozen_until)
            return
        process.beat(
            m.Heartbeat(self.worker_id, self.epoch, process.loop_age_s, self._stats, self._draining)
        )
        self._beats.set_by(now + process.beat_every_s)


def heartbeat_identity(worker_id: str) -> bytes:
    return worker_id.encode() + HEARTBEAT_SUFFIX
