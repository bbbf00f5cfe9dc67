"""The coordinator's end of the control channel: one ROUTER for workers and launcher."""

from __future__ import annotations

import logging
import socket as os_socket
from typing import Any

import zmq
import zmq.asyncio

from coordinator.events import MessageReceived, Send, SendFailed
from splitserve.config import CurveKeys
from splitserve.errors import ConfigError, ProtocolError
from splitserve.logs import LimitedLog
from splitserve.wire.codec import MAX_MESSAGE_BYTES, decoder_for, encode
from splitserve.wire.curve import apply_server, authenticate_asyncio, check_bind
from splitserve.wire.messages import ToCoordinator

HIGH_WATER_MARK = 10_000
LINGER_MS = 200  # for the Releases of what a shutdown failed
MAX_BATCH = 64  # messages taken in one go, before actions are carried out

log = logging.getLogger(__name__)


class Control:
    """Owns the ROUTER, on the running event loop. Sending never waits."""

    def __init__(
        self, host: str, keys: CurveKeys | None, advertise_host: str | None, port: int = 0
    ) -> None:
        """Bind to a port, 0: one the kernel picks. Raises ConfigError when that can't be."""
        check_bind(host, keys)
        self.num_protocol_errors = 0
        self.has_more = False  # the last `receive` left messages for the next one
        self._log = LimitedLog(log)
        self._decoder = decoder_for(ToCoordinator)
        self._context = zmq.asyncio.Context()
        self._authenticator = None if keys is None else authenticate_asyncio(self._context, keys)
        self._socket = _router(self._context, keys)
        try:
            port = _bind(self._socket, host, port)
        except (OSError, zmq.ZMQError) as error:
            self.close()
            raise ConfigError(f"can't bind the control socket to {host}: {error}") from error
        self.endpoint = f"tcp://{_bracketed(advertise_host or host)}:{port}"

    async def receive(self, timeout_s: float | None) -> list[MessageReceived]:
        """Messages that are here; waits up to the timeout for the first. Malformed ones are
        counted, logged at a limited rate, and dropped."""
        timeout_ms = None if timeout_s is None else max(0, int(timeout_s * 1000) + 1)
        self.has_more = False
        if not await self._socket.poll(timeout_ms):
            return []
        received: list[MessageReceived] = []
        self.has_more = True
        for _ in range(MAX_BATCH):
            error, frames = _outcome(self._socket.recv_multipart(zmq.NOBLOCK))
            if error is not None:
                self.has_more = False
                break
            message = self._decode(frames)
            if message is not None:
                received.append(message)
        return received

    def send(self, action: Send) -> SendFailed | None:
        """Queue a message; what went wrong when it can't be."""
        parts = (action.identity, encode(action.message))
        error, _ = _outcome(self._socket.send_multipart(parts, zmq.NOBLOCK))
        if error is None:
            return None
        if not isinstance(error, zmq.ZMQError) or error.errno not in (
            zmq.EAGAIN,
            zmq.EHOSTUNREACH,
        ):
            raise error
        vanished = error.errno == zmq.EHOSTUNREACH
        name = type(action.message).__name__
        self._log.warning(name, f"could not send {name} to {action.identity!r}: {error.strerror}")
        return SendFailed(action.identity, action.message, vanished)

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._socket.close()
        self._context.term()

    def _decode(self, frames: list[bytes]) -> MessageReceived | None:
        try:
            if len(frames) != 2:
                raise ProtocolError(f"{len(frames)} frames, 2 expected")
            return MessageReceived(frames[0], self._decoder.decode(frames[1]))
        except ProtocolError as error:
            self.num_protocol_errors += 1
            self._log.warning("malformed", f"dropped a message on the control channel: {error}")
            return None


def _router(context: zmq.asyncio.Context, keys: CurveKeys | None) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.ROUTER)
    socket.linger = LINGER_MS
    socket.router_mandatory = True
    socket.router_handover = True  # a peer that reconnects may come before its old end is noticed
    socket.sndhwm = socket.rcvhwm = HIGH_WATER_MARK
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    socket.handshake_ivl = 5000
    socket.heartbeat_ivl = 5000
    socket.heartbeat_timeout = 15000
    if keys is not None:
        apply_server(socket, keys)
    return socket


def _outcome(future: Any) -> tuple[BaseException | None, Any]:
    """(error, result) of a call with NOBLOCK: pyzmq hands out a future that is done already."""
    error = future.exception()
    return error, None if error is not None else future.result()


def _bind(socket: zmq.asyncio.Socket, host: str, port: int) -> int:
    """Bind to a port, 0: one the kernel picks; the port that was bound."""
    family, _, _, _, address = os_socket.getaddrinfo(host, 0, type=os_socket.SOCK_STREAM)[0]
    socket.ipv6 = family == os_socket.AF_INET6
    socket.bind(f"tcp://{_bracketed(str(address[0]))}:{port or '*'}")
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
