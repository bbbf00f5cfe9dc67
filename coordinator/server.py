"""The coordinator's process: one event loop for HTTP, the control channel and the clock.

HTTP handlers ──submit, give_back, scale──► Service ──► State (pure)
control ROUTER ──messages─────────────────►    │
      ▲────────────────── Send ────────────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import socket
import time
from pathlib import Path

from coordinator.control import Control
from coordinator.events import HttpOpened, ShutdownRequested
from coordinator.http_api.app import make_app
from coordinator.http_server import HttpServer, base_url, bind_http
from coordinator.service import Service
from coordinator.state import Settings, State
from splitserve.config import CoordinatorConfig
from splitserve.models import model_facts, tokenizer_fingerprint
from splitserve.tokenizer import Tokenizer

MAX_WAIT_S = 0.5  # so that the loop shows it turns, however quiet it is

log = logging.getLogger(__name__)


class Server:
    """Owns the sockets and the loop. Sockets are bound, and closed, by `run`."""

    def __init__(self, config: CoordinatorConfig, ready_fd: int | None = None) -> None:
        self._config = config
        self._ready_fd = ready_fd
        self._stopping = False
        self._http: HttpServer | None = None
        self.url = ""
        self.service = make_service(config)

    async def run(self) -> None:
        """Serve until told to stop. Raises ConfigError when a socket can't be bound."""
        config = self._config
        with contextlib.ExitStack() as stack:
            stack.callback(self.service.close)
            listener = stack.enter_context(bind_http(config))
            control = Control(
                config.control_host, config.keys, config.advertise_host, config.control_port
            )
            stack.callback(control.close)
            await self._serve(listener, control)

    async def _serve(self, listener: socket.socket, control: Control) -> None:
        self.url = base_url(self._config, listener)
        self.service.attach(control.send)
        self.service.num_protocol_errors = lambda: control.num_protocol_errors
        self._http = HttpServer(make_app(self.service), listener, self._http_opened)
        self._report(control.endpoint)
        await self._run_both(control, self._http)

    def stop(self) -> None:
        """Fail what is in flight, with clear errors, and return from `run`. Twice: at once."""
        if self._http is not None:
            self._http.force_exit = self._stopping
            self._http.stop()
        if not self._stopping:
            self._stopping = True
            self.service.apply(ShutdownRequested())

    async def loop(self, control: Control) -> None:
        """Take what came, act on it, see what is due."""
        while True:
            for event in await control.receive(self._wait_s()):
                self.service.apply(event)
            self.service.turn(all_taken=not control.has_more)

    async def _run_both(self, control: Control, server: HttpServer) -> None:
        """Until HTTP has stopped. A loop that dies takes the process with it."""
        loop = asyncio.create_task(self.loop(control), name="control loop")
        http = asyncio.create_task(server.run_until_stopped(), name="http")
        try:
            await asyncio.wait({loop, http}, return_when=asyncio.FIRST_COMPLETED)
            if loop.done():
                loop.result()
            await http
        finally:
            loop.cancel()
            http.cancel()
            await asyncio.gather(loop, http, return_exceptions=True)

    def _wait_s(self) -> float:
        due = self.service.due()
        return MAX_WAIT_S if due is None else min(MAX_WAIT_S, max(0.0, due - time.monotonic()))

    def _http_opened(self) -> None:
        log.info("HTTP at %s", self.url)
        self.service.apply(HttpOpened(self.url))

    def _report(self, control_endpoint: str) -> None:
        """Tell the launcher, through its pipe, where to connect."""
        log.info("control channel at %s", control_endpoint)
        if self._ready_fd is not None:
            line = json.dumps({"control_endpoint": control_endpoint}) + "\n"
            os.write(self._ready_fd, line.encode())
            os.close(self._ready_fd)


def make_service(config: CoordinatorConfig) -> Service:
    """Everything but the sockets. Raises ModelNotFoundError or ConfigError for the model."""
    directory = Path(config.model)
    facts = model_facts(directory)
    settings = Settings(
        epoch=secrets.token_hex(8),
        model_max_len=facts.max_model_len,
        tokenizer_fingerprint=tokenizer_fingerprint(directory),
        num_prefill=config.num_prefill,
        num_decode=config.num_decode,
        router=config.router,
        max_queue=config.max_queue,
        request_timeout_s=config.request_timeout_s,
        drain_grace_s=config.drain_grace_s,
        max_restarts=config.max_restarts,
        start_timeout_s=config.start_timeout_s,
        successor=config.successor,
        promises=config.promises,
        cluster_token=config.cluster_token,
        liveness=config.liveness,
    )
    return Service(config, State(settings), facts, Tokenizer(directory))
