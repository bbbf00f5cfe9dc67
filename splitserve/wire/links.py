"""The sockets of a channel, with every limit set, and what waits to go out on each.

A DEALER speaks to one peer and keeps what ZeroMQ doesn't take yet. A ROUTER speaks to every peer
that connected, keeps nothing, and is told at once when one is gone or full.
"""

from __future__ import annotations

import secrets
import socket as os_socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import zmq

from splitserve.config import CurveKeys
from splitserve.errors import ConfigError
from splitserve.wire.codec import MAX_MESSAGE_BYTES, Decoder, encode
from splitserve.wire.curve import apply_client, apply_server, check_bind
from splitserve.wire.messages import (
    DecodeToPrefill,
    Message,
    PrefillToDecode,
    Received,
    Tokens,
    ToLauncher,
    ToWorker,
)

ZmqSocket = zmq.Socket[bytes]
ZmqContext = zmq.Context[ZmqSocket]
Inbound = ToWorker | ToLauncher | PrefillToDecode | DecodeToPrefill
Part = bytes | memoryview

# Messages, not bytes. A data peer that stops reading pins this many frames inside ZeroMQ.
DATA_HIGH_WATER_MARK = 8
CONTROL_HIGH_WATER_MARK = 1000
ROUTER_SEND_HIGH_WATER_MARK = 1000  # small answers only
MAX_WAITING = 10_000  # messages kept for one peer behind ZeroMQ's own queue


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One message on its way out; `num_bytes` of its parts count as staged."""

    peer: str
    message: Message
    parts: tuple[Part, ...]
    num_bytes: int
    since: float = 0.0

    def leaving(self) -> tuple[Part, ...]:
        """The parts that are sent now: a message that tells how long it lay here is made now."""
        if isinstance(self.message, Tokens | Received):
            unsent_s = time.monotonic() - self.since
            return (encode(replace(self.message, unsent_s=unsent_s)),)
        return self.parts


def outgoing(peer: str, message: Message, buffer: memoryview | None = None) -> Outgoing:
    """A message, and the buffer it announces."""
    if isinstance(message, Tokens | Received):
        return Outgoing(peer, message, (), 0, since=time.monotonic())
    if buffer is None:
        return Outgoing(peer, message, (encode(message),), 0)
    return Outgoing(peer, message, (encode(message), buffer), buffer.nbytes)


@dataclass(slots=True, eq=False)
class Link:
    """A socket, who is at its other end (None: whoever connects), and what waits for it."""

    socket: ZmqSocket
    decoder: Decoder[Inbound]
    peer: str | None
    waiting: deque[Outgoing] = field(default_factory=deque)

    def flush(self) -> list[Outgoing]:
        """Hand over what ZeroMQ takes now; returns that."""
        sent: list[Outgoing] = []
        while self.waiting and self._send(self.waiting[0].leaving()):
            sent.append(self.waiting.popleft())
        return sent

    def _send(self, parts: Sequence[Part]) -> bool:
        try:
            self.socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def send_to(self, identity: bytes, parts: Sequence[Part]) -> bool:
        """Send to one peer of a ROUTER; False when it is gone or its queue is full."""
        try:
            self.socket.send_multipart((identity, *parts), zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True


def secret_identity(name: str) -> bytes:
    """What a worker's socket is called. Whoever knew it could take its place at a ROUTER."""
    return f"{name}/{secrets.token_hex(8)}".encode()


def dealer(
    context: ZmqContext, endpoint: str, identity: bytes | None, keys: CurveKeys | None
) -> ZmqSocket:
    """A connected DEALER. Without an identity it gets a random one, for the data channel.

    Raises zmq.ZMQError when the endpoint is not one.
    """
    socket = _socket(context, zmq.DEALER)
    socket.identity = identity or secrets.token_bytes(16)
    mark = CONTROL_HIGH_WATER_MARK if identity else DATA_HIGH_WATER_MARK
    socket.sndhwm = mark
    socket.rcvhwm = CONTROL_HIGH_WATER_MARK
    socket.reconnect_ivl_max = 500  # a coordinator that is back must not wait for its workers
    if keys is not None:
        apply_client(socket, keys)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


def router(context: ZmqContext, host: str, keys: CurveKeys | None) -> tuple[ZmqSocket, str]:
    """A ROUTER bound to a port the kernel picks, and its endpoint.

    Raises ConfigError when the host is none of this machine, or is off loopback without keys.
    """
    check_bind(host, keys)
    socket = _socket(context, zmq.ROUTER)
    socket.router_mandatory = True
    socket.router_handover = True  # a peer that reconnects may come before its old end is noticed
    socket.sndhwm = ROUTER_SEND_HIGH_WATER_MARK
    socket.rcvhwm = DATA_HIGH_WATER_MARK
    if keys is not None:
        apply_server(socket, keys)
    try:
        family, _, _, _, address = os_socket.getaddrinfo(host, 0, type=os_socket.SOCK_STREAM)[0]
        is_v6 = family == os_socket.AF_INET6
        socket.ipv6 = is_v6
        socket.bind(f"tcp://[{address[0]}]:*" if is_v6 else f"tcp://{address[0]}:*")
    except (OSError, zmq.ZMQError) as error:
        socket.close()
        raise ConfigError(f"can't bind a data socket to {host}: {error}") from error
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _socket(context: ZmqContext, kind: int) -> ZmqSocket:
    socket = context.socket(kind)
    socket.linger = 0
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    socket.handshake_ivl = 5000
    # ZeroMQ's own ping finds ends that vanished without a word, and frees what is kept for them.
    # It is answered by its I/O thread, so a busy process doesn't look gone.
    socket.heartbeat_ivl = 5000
    socket.heartbeat_timeout = 15000
    return socket
