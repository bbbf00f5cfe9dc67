"""A worker's place in the cluster: Hello, Welcome, heartbeats, and how its process ends.

Shared by both worker roles. The worker's loop owns what it does with messages; this owns who the
worker is and that the coordinator knows it lives.
"""

from __future__ import annotations

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
from splitserve.wire.heartbeat import Heartbeat

WELCOME_TIMEOUT_S = 30.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TerminationRequested:
    """Posted to the inbox by SIGTERM or SIGINT: drain and leave."""


class Membership:
    """Owns a worker's identity, its epoch and its heartbeat."""

    def __init__(self, config: WorkerConfig, channel: Channel, worker_id: str) -> None:
        self.worker_id = worker_id
        self.epoch = ""
        self._config = config
        self._channel = channel
        self._heartbeat = Heartbeat(
            config.control_endpoint,
            worker_id,
            config.liveness.heartbeat_interval_s,
            config.keys,
        )

    def join(self, facts: m.WorkerFacts, endpoints: tuple[str, ...] = ()) -> None:
        """Say Hello and wait for Welcome. Raises MismatchError, or LaunchError on silence."""
        hello = m.Hello(
            worker_id=self.worker_id,
            role=self._config.role,
            launch_id=self._config.launch_id,
            pid=os.getpid(),
            host=socket.gethostname(),
            endpoints=endpoints,
            facts=facts,
        )
        self._channel.send_control(hello)
        self.epoch = self._wait_for_welcome()
        self._heartbeat.start(self.epoch)
        log.info("joined epoch %s", self.epoch)

    def turn(self, stats: m.WorkerStats) -> None:
        """The loop has turned; tell the coordinator what changed."""
        self._heartbeat.publish(stats)

    def receive(self, timeout_s: float | None) -> list[object]:
        """The channel's events. While it waits here a loop is idle, not stuck."""
        if timeout_s == 0:
            return self._channel.receive(0)
        self._heartbeat.idle(True)
        try:
            return self._channel.receive(timeout_s)
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

    def _wait_for_welcome(self) -> str:
        deadline = time.monotonic() + WELCOME_TIMEOUT_S
        while (left := deadline - time.monotonic()) > 0:
            for event in self._channel.receive(left):
                match event:
                    case ControlReceived(m.Welcome(epoch)):
                        return epoch
                    case ControlReceived(m.Reject(reason)):
                        raise MismatchError(f"the coordinator refused this worker: {reason}")
                    case TerminationRequested():
                        raise LaunchError("stopped before the coordinator welcomed this worker")
                    case _:
                        log.warning("before Welcome: %s", event)
        raise LaunchError(
            f"no Welcome from {self._config.control_endpoint} within {WELCOME_TIMEOUT_S:g} s"
        )
