"""A worker's sign of life, from a thread of its own: a long forward pass is not a death.

The thread has its own socket to the coordinator's ROUTER and tells it how long ago the worker's
loop last turned. The same exchange tells the worker that the coordinator lives.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable

import zmq

from splitserve.config import CurveKeys
from splitserve.errors import ProtocolError
from splitserve.wire import messages as m
from splitserve.wire.codec import Decoder, decoder_for, encode
from splitserve.wire.curve import apply_client
from splitserve.wire.waker import Waker

SUFFIX = "/heartbeat"  # worker_id + SUFFIX is the identity of the heartbeat's socket
MIN_INTERVAL_S = 0.05  # between two beats, however often the stats change

log = logging.getLogger(__name__)


class Heartbeat:
    """Owns the heartbeat thread of one worker.

    `on_orphaned` is called once, on that thread, when this process has another parent than
    `parent_pid`.
    """

    def __init__(
        self,
        endpoint: str,
        worker_id: str,
        interval_s: float,
        keys: CurveKeys | None = None,
        parent_pid: int | None = None,
        on_orphaned: Callable[[], None] | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._worker_id = worker_id
        self._interval_s = interval_s
        self._keys = keys
        self._parent_pid = parent_pid
        self._on_orphaned = on_orphaned
        self._epoch = ""
        self._stats = m.WorkerStats()
        self._turned_at = time.monotonic()
        self._idle = False
        self._changed = False
        self._acked_at = 0.0
        self._stopping = False
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self, epoch: str) -> None:
        """Begin to beat, once Welcome has named the epoch."""
        self._epoch = epoch
        self._acked_at = self._turned_at = time.monotonic()
        self._thread.start()

    def publish(self, stats: m.WorkerStats) -> None:
        """The loop has turned. Changed stats go out at once, at most every MIN_INTERVAL_S."""
        self._turned_at = time.monotonic()
        if stats != self._stats:
            self._stats = stats
            if not self._changed:
                self._changed = True
                self._waker.wake()

    def idle(self, is_idle: bool) -> None:
        """Whether the loop is blocked waiting for work: it doesn't age meanwhile."""
        self._turned_at = time.monotonic()
        self._idle = is_idle

    def coordinator_age_s(self) -> float:
        """Seconds since the coordinator last answered a beat (or since the start)."""
        return time.monotonic() - self._acked_at

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

    def _run(self) -> None:
        with zmq.Context() as context, self._connect(context) as socket:
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(self._waker.fd, zmq.POLLIN)
            decoder: Decoder[m.HeartbeatAck] = decoder_for(m.HeartbeatAck)
            sent_at = -float("inf")
            while not self._stopping:
                gap_s = min(MIN_INTERVAL_S, self._interval_s) if self._changed else self._interval_s
                wait_s = sent_at + gap_s - time.monotonic()
                if wait_s <= 0:
                    sent_at = time.monotonic()
                    self._beat(socket, sent_at)
                    continue
                poller.poll(math.ceil(wait_s * 1000))
                self._waker.clear()
                self._take_acks(socket, decoder)

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 16  # old beats are worth nothing
        socket.maxmsgsize = 4096
        socket.handshake_ivl = 5000
        socket.identity = (self._worker_id + SUFFIX).encode()
        if self._keys is not None:
            apply_client(socket, self._keys)
        socket.connect(self._endpoint)
        return socket

    def _beat(self, socket: zmq.Socket[bytes], now: float) -> None:
        self._changed = False
        age_s = 0.0 if self._idle else max(0.0, now - self._turned_at)
        beat = m.Heartbeat(self._worker_id, self._epoch, age_s, self._stats)
        try:
            socket.send(encode(beat), zmq.NOBLOCK)
        except zmq.Again:
            log.debug("a beat was dropped: the coordinator does not read")
        self._check_parent()

    def _take_acks(self, socket: zmq.Socket[bytes], decoder: Decoder[m.HeartbeatAck]) -> None:
        while socket.poll(0):
            frames = socket.recv_multipart(zmq.NOBLOCK)
            try:
                ack = decoder.decode(frames[0])
            except ProtocolError as error:
                log.warning("dropped an answer to a heartbeat: %s", error)
                continue
            if ack.epoch == self._epoch:
                self._acked_at = time.monotonic()

    def _check_parent(self) -> None:
        orphaned = self._parent_pid is not None and os.getppid() != self._parent_pid
        if orphaned and self._on_orphaned is not None:
            callback, self._on_orphaned = self._on_orphaned, None
            callback()
