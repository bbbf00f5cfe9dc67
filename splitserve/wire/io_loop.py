"""The loop of a channel's I/O thread: the only code that touches its sockets while it runs.

It never blocks on a peer, and nothing a peer sends can end it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from splitserve.config import CurveKeys
from splitserve.errors import ProtocolError
from splitserve.logs import LimitedLog
from splitserve.wire.codec import decoder_for
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
from splitserve.wire.links import MAX_WAITING, Link, Outgoing, ZmqContext, dealer
from splitserve.wire.messages import DecodeToPrefill, FirstToken, FrameHeader, ToLauncher, ToWorker
from splitserve.wire.staging import Staging
from splitserve.wire.waker import Waker

# Of one socket, so that the others, and what is to be sent, get their turn: frames take their time.
_MAX_RECEIVED_A_TURN = 64
_MAX_TURN_S = 0.005

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Adopt:
    """Take over a socket made by another thread."""

    link: Link


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the link to a peer; what waits for it is dropped."""

    peer: str


Command = Adopt | Disconnect | Outgoing


class IoLoop:
    """Owns the links of one channel. `submit`, `stop` and the counters are for other threads."""

    def __init__(
        self,
        context: ZmqContext,
        keys: CurveKeys | None,
        staging: Staging,
        receiver: FrameSink | None,
        post: Callable[[object], None],
    ) -> None:
        self.num_protocol_errors = 0
        self._context = context
        self._keys = keys
        self._staging = staging
        self._receiver = receiver
        self._post = post
        self._limited_log = LimitedLog(log)
        self._commands: deque[Command] = deque()
        self._waker = Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._waker.fd, zmq.POLLIN)
        self._links: dict[str, Link] = {}  # by peer: DEALERs
        self._router: Link | None = None
        self._linger_s: float | None = None  # set: stop, and wait this long for what is queued

    def submit(self, command: Command) -> None:
        """Have the I/O thread do something soon. Commands keep their order."""
        self._commands.append(command)
        self._waker.wake()

    def stop(self, linger_s: float) -> None:
        """End `run` once everything queued has left, or after `linger_s`."""
        self._linger_s = linger_s
        self._waker.wake()

    def run(self) -> None:
        """Serve until `stop`. A bug ends it with ChannelFailed in the inbox."""
        try:
            while self._linger_s is None:
                self._turn(None)
            stop_at = time.monotonic() + self._linger_s
            while self._num_waiting() and (left_s := stop_at - time.monotonic()) > 0:
                self._turn(left_s)
            self._close(max(0.0, stop_at - time.monotonic()))
        except Exception as error:
            log.exception("the I/O thread failed")
            self._close(0)
            self._post(ChannelFailed(f"{type(error).__name__}: {error}"))
        finally:
            self._waker.close()

    def _turn(self, timeout_s: float | None) -> None:
        timeout_ms = None if timeout_s is None else int(timeout_s * 1000) + 1
        ready = dict(self._poller.poll(timeout_ms))
        if ready.pop(self._waker.fd, None):
            self._waker.clear()
        while self._commands:
            self._carry_out(self._commands.popleft())
        for link in self._all_links():
            events = ready.get(link.socket, 0)
            if events & zmq.POLLIN:
                self._receive(link)
            if events & zmq.POLLOUT:
                self._flush(link)

    def _num_waiting(self) -> int:
        return len(self._commands) + sum(len(link.waiting) for link in self._links.values())

    def _all_links(self) -> list[Link]:
        links = list(self._links.values())
        return links if self._router is None else [*links, self._router]

    # -- outbound ------------------------------------------------------------------------------

    def _carry_out(self, command: Command) -> None:
        match command:
            case Adopt(link):
                self._add(link)
            case Disconnect(peer):
                self._disconnect(peer)
            case Outgoing() if command.peer == COORDINATOR or "://" in command.peer:
                self._queue(command)
            case Outgoing():
                self._route(command)

    def _add(self, link: Link) -> None:
        if link.peer is None:
            assert self._router is None, "bind_data was called twice"
            self._router = link
        else:
            self._links[link.peer] = link
        self._poller.register(link.socket, zmq.POLLIN)

    def _queue(self, outgoing: Outgoing) -> None:
        """To the one peer of a DEALER, behind what waits for it."""
        link = self._links.get(outgoing.peer) or self._connect(outgoing.peer)
        if link is None or len(link.waiting) >= MAX_WAITING:
            self._give_up(outgoing)
            return
        link.waiting.append(outgoing)
        if len(link.waiting) == 1:
            self._flush(link)

    def _connect(self, endpoint: str) -> Link | None:
        if endpoint == COORDINATOR:
            return None
        try:
            socket = dealer(self._context, endpoint, None, self._keys)
        except zmq.ZMQError as error:
            self._limited_log.warning("connect", f"can't connect to {endpoint}: {error}")
            return None
        self._add(Link(socket, decoder_for(DecodeToPrefill), endpoint))
        return self._links[endpoint]

    def _flush(self, link: Link) -> None:
        for sent in link.flush():
            self._unstage(sent)
            if isinstance(sent.message, FirstToken):
                self._post(FirstTokenSent(sent.message, time.monotonic()))
        wanted = zmq.POLLIN | zmq.POLLOUT if link.waiting else zmq.POLLIN
        self._poller.modify(link.socket, wanted)

    def _route(self, outgoing: Outgoing) -> None:
        """To a peer of the ROUTER: it takes the message now, or never."""
        try:
            identity = bytes.fromhex(outgoing.peer)
        except ValueError:
            identity = b""
        if self._router is not None and self._router.send_to(identity, outgoing.leaving()):
            self._unstage(outgoing)
        else:
            self._give_up(outgoing)

    def _give_up(self, outgoing: Outgoing) -> None:
        self._unstage(outgoing)
        self._post(SendFailed(outgoing.peer, outgoing.message))

    def _unstage(self, outgoing: Outgoing) -> None:
        if self._staging.remove(outgoing.peer, outgoing.num_bytes):
            self._post(RoomAvailable(outgoing.peer))

    def _disconnect(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            self._poller.unregister(link.socket)
            link.socket.close(0)
            for dropped in link.waiting:
                self._staging.remove(peer, dropped.num_bytes)

    # -- inbound -------------------------------------------------------------------------------

    def _receive(self, link: Link) -> None:
        turn_over = time.monotonic() + _MAX_TURN_S
        for _ in range(_MAX_RECEIVED_A_TURN):
            if time.monotonic() >= turn_over:
                return
            try:
                frames = link.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                self._take(link, frames)
            except ProtocolError as error:
                self.num_protocol_errors += 1
                self._limited_log.warning("received", f"dropped a received message: {error}")
            except Exception:  # a bug of ours must not make the process deaf
                log.exception("failed to handle a received message")

    def _take(self, link: Link, frames: Sequence[zmq.Frame]) -> None:
        peer = link.peer
        if peer is None:
            peer, frames = frames[0].bytes.hex(), frames[1:]
        if len(frames) not in (1, 2):
            raise ProtocolError(f"{len(frames)} parts")
        message = link.decoder.decode(frames[0].buffer)
        if isinstance(message, FrameHeader) != (len(frames) == 2):
            raise ProtocolError(f"{type(message).__name__} with {len(frames) - 1} buffers")
        if isinstance(message, FrameHeader):
            self._take_frame(message, frames[1].buffer)
        elif isinstance(message, ToWorker | ToLauncher):
            self._post(ControlReceived(message, time.monotonic()))
        else:
            self._post(DataReceived(peer, message, time.monotonic()))

    def _take_frame(self, header: FrameHeader, data: memoryview) -> None:
        if self._receiver is None:
            raise ProtocolError("a frame, and nobody here takes any")
        self._post(self._receiver.accept(header, data))

    def _close(self, linger_s: float) -> None:
        """Close every socket, also those not yet taken over: the context waits for them."""
        never_adopted = [c.link for c in self._commands if isinstance(c, Adopt)]
        for link in (*self._all_links(), *never_adopted):
            link.socket.close(int(linger_s * 1000))
