"""uvicorn inside our own event loop, on a socket we bound ourselves."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from splitserve.config import CoordinatorConfig
from splitserve.errors import ConfigError
from splitserve.hosts import is_loopback
from splitserve.logs import LimitedLog

SHUTDOWN_TIMEOUT_S = 1  # for answers that are being written when we stop
BACKLOG = 2048

limited = LimitedLog(logging.getLogger(__name__))


def bind_http(config: CoordinatorConfig) -> socket.socket:
    """The listening socket. Raises ConfigError naming host and port when it can't be."""
    if not config.api_keys and not is_loopback(config.host):
        raise ConfigError(
            f"refused to serve HTTP on {config.host} without an API key (--api-key): "
            "only loopback needs none"
        )
    try:
        family, _, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # Named, since asyncio sets TCP_NODELAY only where the protocol says TCP: without it each
        # small answer waits 40 ms for the client's acknowledgement of the one before.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise _cannot_listen(config, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _cannot_listen(config, error) from error
    listener.setblocking(False)
    return listener


def base_url(config: CoordinatorConfig, listener: socket.socket) -> str:
    """Where clients reach us: a wildcard address is named by one that can be connected to."""
    host = config.host
    if host in ("", "0.0.0.0", "::"):
        host = config.advertise_host or "127.0.0.1"
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}"


class HttpServer(uvicorn.Server):
    """Serves the app on a bound socket; leaves signals to the process that owns the loop."""

    def __init__(self, app: ASGIApp, listener: socket.socket, on_open: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                http="h11",
                ws="none",
                timeout_keep_alive=75,
                timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
                server_header=False,
            )
        )
        self._listener = listener
        self._on_open = on_open

    async def run_until_stopped(self) -> None:
        await self.serve(sockets=[self._listener])

    def stop(self) -> None:
        """Accept nothing more, finish what is being written, return from run_until_stopped."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(on_loop_error)
        await super().startup(sockets)
        self._on_open()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Out of descriptors, asyncio reports each accept that failed, for each turn of its loop."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        limited.warning("accept", f"new HTTP connections wait: {error.strerror}")
    else:
        loop.default_exception_handler(context)


def _cannot_listen(config: CoordinatorConfig, error: OSError) -> ConfigError:
    return ConfigError(
        f"can't listen for HTTP on host {config.host} port {config.port}: {error.strerror}"
    )
