"""The coordinator as its launcher sees it: started, heard, found dead, started again.

    start ─CoordinatorUp─► Hello ─Welcome─► beats, answered ──► (its process ends) ─► wait ─► start
                             ▲                └ unanswered ──► SIGKILL ───▲
                             └── for a while ───┘

Until the cluster was ready once, the end of the coordinator is the end of the cluster.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import zmq

from splitserve.config import CurveKeys
from splitserve.errors import LaunchError, ProtocolError
from splitserve.launch.child import Exited
from splitserve.launch.plan import Comeback
from splitserve.launch.spawner import COORDINATOR, Inbox, Spawner
from splitserve.restarts import RestartPolicy
from splitserve.wire import messages as m
from splitserve.wire.codec import decoder_for, encode
from splitserve.wire.links import dealer

if TYPE_CHECKING:
    from splitserve.settings import ServeSettings

COMEBACK_TIMEOUT_S = 60.0  # for one that is started again to bind its socket
WELCOME_TIMEOUT_S = 10.0  # for one that has

log = logging.getLogger(__name__)


class CoordinatorLife:
    """Owns the way to the coordinator, through all its lives. For the launcher's thread only."""

    def __init__(
        self,
        spawner: Spawner,
        inbox: Inbox,
        settings: ServeSettings,
        keys: CurveKeys | None,
        cluster_token: str,
        launches: Callable[[], tuple[m.Launched, ...]],
    ) -> None:
        """`launches` are the workers that run here."""
        self.control_endpoint: str | None = None
        self.ready: m.Ready | None = None  # what it said first when all was up
        self._spawner = spawner
        self._inbox = inbox
        self._liveness = settings.liveness
        self._keys = keys
        self._cluster_token = cluster_token
        self._launches = launches
        self._comeback_timeout_s = min(settings.start_timeout_s, COMEBACK_TIMEOUT_S)
        self._targets = m.Targets(settings.prefill.num_workers, settings.decode.num_workers)
        self._restarts = RestartPolicy(settings.max_restarts)
        self._worker_id = f"launcher-{uuid.uuid4().hex[:12]}"
        self._epoch = ""
        self._link: _Link | None = None
        self._num_unanswered = 0  # beats since the last answer
        self._first_exit: Exited | None = None  # of those that count now
        self._timer: tuple[float, Callable[[float], None]] | None = None  # what is next, and when

    @property
    def socket(self) -> zmq.Socket[bytes] | None:
        """Readable when `receive` has something; None while there is nobody to hear."""
        return None if self._link is None else self._link.socket

    @property
    def due_at(self) -> float | None:
        """When `turn` has something to do."""
        return None if self._timer is None else self._timer[0]

    def start(self) -> None:
        """Start the first one. Raises LaunchError."""
        self._spawner.start_coordinator(self._inbox, None)

    def came_up(self, control_endpoint: str) -> None:
        """It has bound its control socket: say Hello, and which workers run here."""
        self.control_endpoint = control_endpoint
        self._close_link()
        self._link = _Link(control_endpoint, self._worker_id, self._keys)
        self._say_hello()
        if self.ready is not None:
            self._timer = (time.monotonic() + WELCOME_TIMEOUT_S, self._never_came_up)

    def receive(self) -> list[m.ToLauncher]:
        """All messages that are here, without waiting."""
        return [] if self._link is None else self._link.receive()

    def send(self, message: m.ToCoordinator) -> bool:
        """Tell it; False when there is none now."""
        if self._link is None:
            return False
        self._link.send(message)
        return True

    def take(self, message: m.ToLauncher) -> None:
        """What a message says about the coordinator itself. Raises LaunchError for a Reject."""
        match message:
            case m.Welcome(epoch):
                self._welcomed(epoch)
            case m.Reject(reason):
                raise LaunchError(f"the coordinator refused its launcher: {reason}")
            case m.HeartbeatAck(epoch) if epoch == self._epoch:
                self._num_unanswered = 0
            case m.Targets():
                self._targets = message
            case m.Ready():
                self.ready = self.ready or message
                self._num_unanswered = 0
            case _:
                pass  # about workers

    def exited(self, exited: Exited) -> None:
        """Its process has ended. Raises LaunchError when it is not to be started again."""
        self._close_link()
        self._timer = None
        if self.ready is None:
            raise LaunchError(str(exited))
        now = time.monotonic()
        delay_s = self._restarts.next_delay(now)
        if self._restarts.num_recent == 1 or self._first_exit is None:
            self._first_exit = exited
        if delay_s is None:
            raise self._given_up(exited)
        log.warning("the coordinator is started again in %g s: %s", delay_s, exited)
        self._timer = (now + delay_s, self._start_again)

    def turn(self, now: float) -> None:
        """Do what is due. All that waited in the socket was taken before."""
        if self._timer is not None and now >= self._timer[0]:
            _, action = self._timer
            self._timer = None
            action(now)

    def close(self) -> None:
        self._close_link()

    def _welcomed(self, epoch: str) -> None:
        if self.ready is not None:
            log.info("the coordinator is back at %s, in epoch %s", self.ready.base_url, epoch)
        self._epoch = epoch
        self._num_unanswered = 0
        self._timer = (time.monotonic(), self._beat)

    def _beat(self, now: float) -> None:
        """Say that we live, and see whether it does.

        It is judged by beats, not by time: a pause of this process must not count as its silence.
        """
        interval_s = self._liveness.heartbeat_interval_s
        silence_s = self._num_unanswered * interval_s
        if self.ready is not None and silence_s >= self._liveness.heartbeat_timeout_s:
            self._kill(f"has not answered for {silence_s:g} s")
            return
        self._num_unanswered += 1
        if 2 * silence_s >= self._liveness.heartbeat_timeout_s:
            self._say_hello()  # after a pause of ours it may take us for gone
        else:
            self.send(m.Heartbeat(self._worker_id, self._epoch, 0.0, m.WorkerStats()))
        self._timer = (now + interval_s, self._beat)

    def _say_hello(self) -> None:
        hello = m.Hello(
            self._worker_id,
            "launcher",
            self._worker_id,
            os.getpid(),
            socket.gethostname(),
            launches=self._launches(),
            cluster_token=self._cluster_token,
        )
        self.send(hello)

    def _start_again(self, now: float) -> None:
        try:
            self._spawner.start_coordinator(self._inbox, self._comeback())
        except LaunchError as error:
            self.exited(Exited(COORDINATOR, 0, 1, str(error)))
            return
        self._timer = (now + self._comeback_timeout_s, self._never_came_up)

    def _never_came_up(self, _now: float) -> None:
        self._kill("did not come back in time")

    def _kill(self, reason: str) -> None:
        log.warning("the coordinator %s; killing it", reason)
        self._spawner.kill_coordinator()  # its exit comes to the inbox

    def _given_up(self, exited: Exited) -> LaunchError:
        """The first end is told too: later ones often only follow from it."""
        number = self._restarts.num_recent
        count = "once" if number == 1 else f"{number} times in a short time"
        text = f"the coordinator ended {count} and is given up: {exited}"
        if self._first_exit is not exited:
            text += f"\nthe first time: {self._first_exit}"
        return LaunchError(text)

    def _comeback(self) -> Comeback:
        assert self.ready is not None and self.control_endpoint is not None
        ports = urlsplit(self.ready.base_url).port, urlsplit(self.control_endpoint).port
        assert ports[0] is not None and ports[1] is not None
        targets = self._targets
        wanted = targets.prefill, targets.decode
        return Comeback(ports[0], ports[1], *wanted, self.ready.promises, str(self._first_exit))

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


class _Link:
    """The launcher's end of the control channel to one coordinator."""

    def __init__(self, endpoint: str, worker_id: str, keys: CurveKeys | None) -> None:
        self._context = zmq.Context()
        self.socket = dealer(self._context, endpoint, worker_id.encode(), keys)
        self._decoder = decoder_for(m.ToLauncher)

    def send(self, message: m.ToCoordinator) -> None:
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            log.error("the coordinator does not read; lost %s", type(message).__name__)

    def receive(self) -> list[m.ToLauncher]:
        """All messages that are here. What is none is logged and dropped."""
        messages: list[m.ToLauncher] = []
        while self.socket.poll(0):
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
            try:
                messages.append(self._decoder.decode(frames[0]))
            except ProtocolError as error:
                log.warning("dropped a message from the coordinator: %s", error)
        return messages

    def close(self) -> None:
        self.socket.close()
        self._context.term()
