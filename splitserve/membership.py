"""A worker's place in the cluster: Hello, Welcome, heartbeats, and how its process ends.

Shared by both worker roles. The worker's loop owns what it does with messages; this owns who the
worker is and that the coordinator knows it lives.

A worker outlives its coordinator. CoordinatorLost comes when that one's process is gone. When
another answers, EpochChanged comes and the loop says `rejoin` with what it holds; on the Welcome
that follows it says `welcomed`, and frees what the Welcome doesn't keep. Until then the loop goes
on as before.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import socket
import time
from dataclasses import dataclass
from types import FrameType

from splitserve.config import WorkerConfig
from splitserve.errors import LaunchError, MismatchError
from splitserve.wire import messages as m
from splitserve.wire.channel import Channel, ControlReceived
from splitserve.wire.heartbeat import CoordinatorLost, EpochChanged, Heartbeat

__all__ = [
    "CoordinatorLost",
    "EpochChanged",
    "Membership",
    "TerminationRequested",
]

WELCOME_TIMEOUT_S = 30.0
_HELLO_AGAIN_S = 3.0  # the coordinator that had our Hello may be dead

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TerminationRequested:
    """Posted to the inbox by SIGTERM or SIGINT: drain and leave."""


class Membership:
    """Owns a worker's identity, its epoch and its heartbeat."""

    def __init__(self, config: WorkerConfig, channel: Channel, worker_id: str) -> None:
        self.worker_id = worker_id
        self.epoch = ""
        self.drain_grace_s = config.drain_grace_s
        self.max_step_s = config.liveness.max_step_s
        self._config = config
        self._channel = channel
        self._behind_welcome: list[object] = []  # what came with it, for the loop
        self._hello = m.Hello(
            worker_id=worker_id,
            role=config.role,
            launch_id=config.launch_id,
            pid=os.getpid(),
            host=socket.gethostname(),
            cluster_token=config.cluster_token,
        )
        self._heartbeat = Heartbeat(
            config.control_endpoint,
            worker_id,
            config.liveness.heartbeat_interval_s,
            config.keys,
            channel.post,
            channel.identity,
        )

    @property
    def connected(self) -> bool:
        """Whether a coordinator's process is at the other end, known to this worker or not."""
        return self._heartbeat.connected

    def join(self, facts: m.WorkerFacts, endpoints: tuple[str, ...] = ()) -> None:
        """Say Hello and wait for Welcome. Raises MismatchError, or LaunchError on silence."""
        self._hello = dataclasses.replace(self._hello, endpoints=endpoints, facts=facts)
        self.epoch = self._wait_for_welcome()
        self._heartbeat.start(self.epoch)
        num_blocks = facts.num_blocks
        self._heartbeat.publish(
            m.WorkerStats(num_blocks_total=num_blocks, num_blocks_free=num_blocks)
        )
        size = f"{num_blocks} blocks of {facts.layout.block_size} tokens in {facts.layout.dtype}"
        text = "joined epoch %s with %s, %d threads on %s"
        log.info(text, self.epoch, size, facts.num_threads, facts.device)

    def rejoin(self, held: tuple[m.Held, ...]) -> None:
        """After EpochChanged: say Hello again, with all that this worker holds.

        Its answer comes through `receive`: a Welcome, or a MismatchError. When none comes, there
        will be another EpochChanged.
        """
        log.info("the coordinator is another one; saying Hello again, holding %d", len(held))
        self._channel.send_control(dataclasses.replace(self._hello, held=held))

    def welcomed(self, welcome: m.Welcome) -> bool:
        """Belong to the coordinator that said this; whether it is another one than before.

        If so, all that is not in `welcome.keep` is to be freed.
        """
        if welcome.epoch == self.epoch:
            return False
        self.epoch = welcome.epoch
        self._heartbeat.adopt(welcome.epoch)
        log.info("joined epoch %s", self.epoch)
        return True

    def start_draining(self) -> None:
        """Tell the coordinator, now and with every beat, that this worker takes nothing new."""
        self._heartbeat.drain()

    def turn(self, stats: m.WorkerStats) -> None:
        """The loop has turned; tell the coordinator what changed."""
        self._heartbeat.publish(stats)

    def receive(self, timeout_s: float | None) -> list[object]:
        """The channel's events. While it waits here a loop is idle, not stuck.

        Raises MismatchError when the coordinator won't have this worker any more.
        """
        if self._behind_welcome:
            events, self._behind_welcome = self._behind_welcome, []
            return self._checked(events)
        if timeout_s == 0:
            return self._checked(self._channel.receive(0))
        self._heartbeat.idle(True)
        try:
            return self._checked(self._channel.receive(timeout_s))
        finally:
            self._heartbeat.idle(False)

    def leave(self) -> None:
        self._heartbeat.stop()
        self._channel.close()

    def watch_signals(self) -> None:
        """SIGTERM and SIGINT become an event; a second one ends the process at once."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        self._channel.post(TerminationRequested())

    def _checked(self, events: list[object]) -> list[object]:
        for event in events:
            if isinstance(event, ControlReceived) and isinstance(event.message, m.Reject):
                raise MismatchError(f"the coordinator refused this worker: {event.message.reason}")
        return events

    def _wait_for_welcome(self) -> str:
        deadline = time.monotonic() + WELCOME_TIMEOUT_S
        while (left_s := deadline - time.monotonic()) > 0:
            self._channel.send_control(self._hello)
            epoch = self._welcome_within(min(left_s, _HELLO_AGAIN_S))
            if epoch is not None:
                return epoch
        raise LaunchError(
            f"no Welcome from {self._config.control_endpoint} within {WELCOME_TIMEOUT_S:g} s"
        )

    def _welcome_within(self, timeout_s: float) -> str | None:
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            events = self._checked(self._channel.receive(left_s))
            for position, event in enumerate(events):
                match event:
                    case ControlReceived(m.Welcome(epoch)):
                        self._behind_welcome = events[position + 1 :]
                        return epoch
                    case TerminationRequested():
                        raise LaunchError("stopped before the coordinator welcomed this worker")
                    case _:
                        log.warning("before Welcome: %s", event)
        return None
