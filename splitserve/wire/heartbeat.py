"""A worker's sign of life, from a thread of its own: a long forward pass is not a death.

The thread has its own socket to the coordinator's ROUTER and tells it how long ago the worker's
loop last turned. The same socket tells the worker, at once, that the coordinator's process is gone,
and by the answers that another has taken its place.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from splitserve.config import CurveKeys
from splitserve.errors import ProtocolError
from splitserve.wire import messages as m
from splitserve.wire.codec import Decoder, decoder_for, encode
from splitserve.wire.curve import apply_client
from splitserve.wire.parts import HEARTBEAT_SUFFIX
from splitserve.wire.waker import Waker

MIN_INTERVAL_S = 0.05  # between two beats, however often the stats change
MIN_NEWS_INTERVAL_S = 1.0  # between two EpochChanged, whatever the coordinators do
REMINDER_S = 5.0  # between two EpochChanged for the same epoch, while it is not adopted
_CONNECTED = zmq.Event.HANDSHAKE_SUCCEEDED
_LOST = zmq.Event.DISCONNECTED | zmq.Event.CONNECT_RETRIED

ZmqSocket = zmq.Socket[bytes]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EpochChanged:
    """The coordinator that answers is another one, of this epoch, and doesn't know this worker."""

    epoch: str


@dataclass(frozen=True, slots=True)
class CoordinatorLost:
    """The connection to the coordinator has ended: its process is gone, or its machine."""


class Heartbeat:
    """Owns the heartbeat thread of one worker.

    `post` gets EpochChanged and CoordinatorLost, on that thread.
    """

    def __init__(
        self,
        endpoint: str,
        worker_id: str,
        interval_s: float,
        keys: CurveKeys | None,
        post: Callable[[object], None],
        identity: bytes | None = None,
    ) -> None:
        """`identity` is that of the worker's control connection; None: its worker_id."""
        self._endpoint = endpoint
        self._worker_id = worker_id
        self._identity = (identity or worker_id.encode()) + HEARTBEAT_SUFFIX
        self._interval_s = interval_s
        self._keys = keys
        self._post = post
        self._epoch = ""
        self._stats = m.WorkerStats()
        self._turned_at = time.monotonic()
        self._idle = False
        self._draining = False
        self._connected = True  # whoever starts this was welcomed just now
        self._hurry = False  # something changed that the coordinator should hear soon
        self._dropped = False  # the last beat was not sent
        self._news = _EpochNews()
        self._stopping = False
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    @property
    def connected(self) -> bool:
        """Whether there is a coordinator's process at the other end."""
        return self._connected

    def start(self, epoch: str) -> None:
        """Begin to beat, once Welcome has named the epoch."""
        self._epoch = epoch
        self._turned_at = time.monotonic()
        self._thread.start()

    def adopt(self, epoch: str) -> None:
        """Another coordinator has welcomed the worker; it is told at once that it lives."""
        self._epoch = epoch
        self._beat_soon()

    def drain(self) -> None:
        """From now on every beat, the next one at once, says that the worker is draining."""
        self._draining = True
        self._beat_soon()

    def publish(self, stats: m.WorkerStats) -> None:
        """The loop has turned. Changed stats go out at once, at most every MIN_INTERVAL_S."""
        self._turned_at = time.monotonic()
        if stats != self._stats:
            self._stats = stats
            if not self._hurry:
                self._beat_soon()

    def idle(self, is_idle: bool) -> None:
        """Whether the loop is blocked waiting for work: it doesn't age meanwhile."""
        self._turned_at = time.monotonic()
        self._idle = is_idle

    def stop(self, deadline_s: float = 2.0) -> None:
        """End the thread; safe to call twice, and before `start`."""
        self._stopping = True
        self._waker.wake()
        if self._thread.ident is not None:
            self._thread.join(deadline_s)
        if self._thread.is_alive():
            log.error("the heartbeat thread did not end within %g s", deadline_s)
        else:
            self._waker.close()

    def _beat_soon(self) -> None:
        self._hurry = True
        self._waker.wake()

    def _run(self) -> None:
        with zmq.Context() as context, self._make_socket(context) as socket:
            monitor = socket.get_monitor_socket(_CONNECTED | _LOST)
            socket.connect(self._endpoint)
            try:
                self._serve(socket, monitor)
            finally:
                socket.disable_monitor()  # first, for ZeroMQ writes to a reader that is there
                monitor.close()

    def _serve(self, socket: ZmqSocket, monitor: ZmqSocket) -> None:
        poller = zmq.Poller()
        for source in (socket, monitor, self._waker.fd):
            poller.register(source, zmq.POLLIN)
        decoder: Decoder[m.HeartbeatAck] = decoder_for(m.HeartbeatAck)
        sent_at = -float("inf")
        while not self._stopping:
            gap_s = min(MIN_INTERVAL_S, self._interval_s) if self._hurry else self._interval_s
            wait_s = sent_at + gap_s - time.monotonic()
            if wait_s <= 0:
                sent_at = time.monotonic()
                self._beat(socket, sent_at)
                continue
            poller.poll(math.ceil(wait_s * 1000))
            self._waker.clear()
            self._watch(monitor)
            self._take_acks(socket, decoder)

    def _make_socket(self, context: zmq.Context[ZmqSocket]) -> ZmqSocket:
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 16
        socket.immediate = True  # a beat that can't be sent now is worth nothing later
        socket.maxmsgsize = 4096
        socket.handshake_ivl = 5000
        # Finds out that a machine vanished without a word; a process that ends is noticed at once.
        socket.heartbeat_ivl = 5000
        socket.heartbeat_timeout = 15000
        socket.identity = self._identity
        if self._keys is not None:
            apply_client(socket, self._keys)
        return socket

    def _beat(self, socket: ZmqSocket, now: float) -> None:
        self._hurry = self._dropped = False
        age_s = 0.0 if self._idle else max(0.0, now - self._turned_at)
        beat = m.Heartbeat(self._worker_id, self._epoch, age_s, self._stats, self._draining)
        try:
            socket.send(encode(beat), zmq.NOBLOCK)
        except zmq.Again:
            self._dropped = True
            log.debug("a beat was dropped: there is no coordinator, or it does not read")

    def _watch(self, monitor: ZmqSocket) -> None:
        """Take in what has become of the connection."""
        while monitor.poll(0):
            was_connected = self._connected
            self._connected = bool(recv_monitor_message(monitor)["event"] & _CONNECTED)
            if self._connected and (self._dropped or not was_connected):
                self._hurry = True  # what was said before is lost, or may be
            elif was_connected and not self._connected:
                self._post(CoordinatorLost())

    def _take_acks(self, socket: ZmqSocket, decoder: Decoder[m.HeartbeatAck]) -> None:
        while socket.poll(0):
            frames = socket.recv_multipart(zmq.NOBLOCK)
            try:
                ack = decoder.decode(frames[0])
            except ProtocolError as error:
                log.warning("dropped an answer to a heartbeat: %s", error)
                continue
            if ack.epoch != self._epoch and self._news.is_due(ack.epoch, time.monotonic()):
                self._post(EpochChanged(ack.epoch))


class _EpochNews:
    """Decides when the worker is told of another epoch: once for each, and now and then again
    while it has not adopted it, for its Hello or the Welcome may be lost."""

    def __init__(self) -> None:
        self._epoch: str | None = None
        self._told_at = -math.inf

    def is_due(self, epoch: str, now: float) -> bool:
        gap_s = REMINDER_S if epoch == self._epoch else MIN_NEWS_INTERVAL_S
        if now - self._told_at < gap_s:
            return False
        self._epoch, self._told_at = epoch, now
        return True
