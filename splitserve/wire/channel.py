"""A worker's connections, behind thread-safe calls: one I/O thread owns all its sockets.

    engine thread ── send_control, send_data ──► I/O thread ──► ZeroMQ
    engine thread ◄─────── receive ───────────── I/O thread ◄── ZeroMQ
                                                    └─ frames ──► receiver.accept, on that thread

The control channel is a DEALER to the coordinator's ROUTER. On the data channel a decode worker
binds a ROUTER, and a prefill worker connects a DEALER to each endpoint it sends to. No call blocks
on a peer: what can't be sent comes back as SendFailed.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any

import zmq

from splitserve.config import CurveKeys
from splitserve.errors import ConfigError
from splitserve.wire.codec import decoder_for
from splitserve.wire.curve import authenticate
from splitserve.wire.events import (
    COORDINATOR,
    ChannelFailed,
    ControlReceived,
    DataReceived,
    FirstTokenSent,
    FrameSink,
    RoomAvailable,
    SendFailed,
)
from splitserve.wire.io_loop import Adopt, Disconnect, IoLoop
from splitserve.wire.links import Link, dealer, outgoing, router
from splitserve.wire.messages import (
    DecodeToPrefill,
    PrefillToDecode,
    ToCoordinator,
    ToWorker,
)
from splitserve.wire.staging import Staging

__all__ = [
    "COORDINATOR",
    "STAGING_BUDGET_BYTES",
    "Channel",
    "ChannelFailed",
    "ControlReceived",
    "DataReceived",
    "FirstTokenSent",
    "FrameSink",
    "RoomAvailable",
    "SendFailed",
]

STAGING_BUDGET_BYTES = 64 << 20

log = logging.getLogger(__name__)


class Channel:
    """Owns the I/O thread and the inbox of one worker.

    Every method may be called from any thread. `receiver` gets the frames of the data channel, on
    the I/O thread.
    """

    def __init__(
        self,
        keys: CurveKeys | None = None,
        receiver: FrameSink | None = None,
        staging_budget_bytes: int = STAGING_BUDGET_BYTES,
    ) -> None:
        self.identity = b""  # of the control connection
        self._keys = keys
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._staging = Staging(staging_budget_bytes)
        self._context = zmq.Context()
        self._authenticator = None if keys is None else authenticate(self._context, keys)
        self._loop = IoLoop(self._context, keys, self._staging, receiver, self.post)
        self._thread = threading.Thread(target=self._run, name="channel", daemon=True)
        self._thread.start()

    @property
    def num_protocol_errors(self) -> int:
        """Received messages that were none of this protocol, and were dropped."""
        return self._loop.num_protocol_errors

    @property
    def staging_budget_bytes(self) -> int:
        """The most bytes of buffers that may wait for one peer."""
        return self._staging.budget_bytes

    def connect_control(self, endpoint: str, identity: bytes, inbound: Any = ToWorker) -> None:
        """Connect to the coordinator, from which messages of the union `inbound` are taken.

        Raises ConfigError when `endpoint` is not one. The connection itself is made, and made
        again after a loss, in the background.
        """
        self.identity = identity
        try:
            socket = dealer(self._context, endpoint, identity, self._keys)
        except zmq.ZMQError as error:
            raise ConfigError(f"can't connect to {endpoint!r}: {error}") from error
        self._loop.submit(Adopt(Link(socket, decoder_for(inbound), COORDINATOR)))

    def bind_data(self, host: str) -> str:
        """Bind the data channel to a port the kernel picks; returns 'tcp://host:port'.

        Raises ConfigError when the host can't be bound, or is off loopback without keys.
        """
        socket, endpoint = router(self._context, host, self._keys)
        self._loop.submit(Adopt(Link(socket, decoder_for(PrefillToDecode), peer=None)))
        return endpoint

    def send_control(self, message: ToCoordinator) -> None:
        """Send to the coordinator."""
        self._loop.submit(outgoing(COORDINATOR, message))

    def send_data(
        self,
        peer: str,
        message: PrefillToDecode | DecodeToPrefill,
        buffer: memoryview | None = None,
    ) -> None:
        """Send to an endpoint (connected on first use), or to the peer of a received message.

        The buffer is not copied and must not change until it is sent. When it doesn't fit in the
        staging budget it comes back as SendFailed.
        """
        num_bytes = 0 if buffer is None else buffer.nbytes
        if not self._staging.add(peer, num_bytes):
            self.post(SendFailed(peer, message))
            return
        self._loop.submit(outgoing(peer, message, buffer))

    def disconnect(self, peer: str) -> None:
        """Close the connection to an endpoint. What was queued for it is dropped, unsent."""
        self._loop.submit(Disconnect(peer))

    def staged_bytes(self, peer: str) -> int:
        """Bytes of buffers given to send_data for this peer and not yet handed to ZeroMQ."""
        return self._staging.staged_bytes(peer)

    def post(self, event: object) -> None:
        """Put an event of your own into the inbox. Signal handlers may call this."""
        self._inbox.put(event)

    def receive(self, timeout_s: float | None) -> list[object]:
        """All waiting events, in order; blocks until there is one or until the timeout.

        0 doesn't wait, None waits for as long as it takes.
        """
        if timeout_s is not None:
            timeout_s = min(max(0.0, timeout_s), threading.TIMEOUT_MAX)
        try:
            events = [self._inbox.get(timeout=timeout_s)]
        except queue.Empty:
            return []
        return [*events, *(self._inbox.get_nowait() for _ in range(self._inbox.qsize()))]

    def close(self, linger_s: float = 1.0) -> None:
        """End the I/O thread. What was sent before has `linger_s` to leave. Safe to call twice."""
        self._loop.stop(linger_s)
        self._thread.join(linger_s + 2.0)
        if self._thread.is_alive():
            log.error("the I/O thread did not end within %g s", linger_s + 2.0)

    def _run(self) -> None:
        self._loop.run()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
