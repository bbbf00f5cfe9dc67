"""The launcher: a peer of the coordinator that starts, stops and reaps processes for it.

    Launcher ──start──► Spawner ──► coordinator, workers         (local.py, ray_workers.py)
       ▲  ▲                │ CoordinatorUp, Exited
       │  └── Inbox ◄──────┘
       └── DEALER ── Hello, ProcessExited ──► coordinator ── Welcome, Start, Stop, Ready ──► back

One thread runs it all and waits in one place, for a message or for something in the inbox.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid

import zmq

from splitserve.config import CurveKeys, Role
from splitserve.errors import LaunchError, ProtocolError
from splitserve.launch.child import Exited
from splitserve.launch.plan import WorkerPlace
from splitserve.launch.spawner import (
    COORDINATOR,
    CoordinatorUp,
    Event,
    Inbox,
    Spawner,
    StopRequested,
)
from splitserve.wire.codec import decoder_for, encode
from splitserve.wire.links import dealer
from splitserve.wire.messages import (
    Hello,
    ProcessExited,
    Ready,
    Reject,
    Start,
    Stop,
    ToCoordinator,
    ToLauncher,
    Welcome,
)

_IDLE_WAIT_S = 60.0  # how long one wait may last when nothing is due

log = logging.getLogger(__name__)


class Launcher:
    """Owns the life of one cluster: from the coordinator's start until everything is reaped."""

    def __init__(
        self,
        spawner: Spawner,
        *,
        start_timeout_s: float,
        stop_grace_s: float,
        keys: CurveKeys | None,
    ) -> None:
        self._spawner = spawner
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._keys = keys
        self._inbox = Inbox()
        self._places: dict[str, WorkerPlace] = {}  # workers not yet seen to exit
        self._stopping: set[str] = set()  # those we were told to stop
        self._control_endpoint: str | None = None
        self._channel: _Channel | None = None
        self._ready: Ready | None = None
        self._failure: LaunchError | None = None
        self._stop = False
        self._changed = threading.Condition()
        self._done = False
        self._thread = threading.Thread(target=self._run, name="launcher", daemon=True)

    def start(self) -> str:
        """Bring the cluster up; its base URL, when every worker is ready and HTTP answers.

        Raises LaunchError naming the process that failed and why; then nothing is left running.
        """
        self.begin()
        return self.wait_ready()

    def begin(self) -> None:
        """Start bringing the cluster up, and return at once."""
        self._thread.start()

    def wait_ready(self) -> str:
        """The base URL, once ready. Raises LaunchError as `start` does."""
        limit_s = self._start_timeout_s + self._stop_grace_s + 30.0
        with self._changed:
            ended = self._changed.wait_for(lambda: self._done or self._ready, timeout=limit_s)
        if self._ready is not None and not self._done:
            return self._ready.base_url
        if not ended:
            self.kill()
        raise self._failure or LaunchError("the cluster was stopped before it was ready")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether the cluster has ended, for whatever reason, within the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._done, timeout=timeout_s)

    @property
    def failure(self) -> LaunchError | None:
        """Why the cluster ended by itself; None while it runs, or when it was told to stop."""
        return self._failure

    def request_stop(self) -> None:
        """Begin a graceful stop. Callable from a signal handler; returns at once."""
        self._inbox.post(StopRequested())

    def stop(self) -> None:
        """Stop everything gracefully; returns when all processes are gone. Idempotent."""
        self.request_stop()
        if not self.wait(2 * self._stop_grace_s + 10.0):
            self.kill()
            self.wait(10.0)

    def kill(self) -> None:
        """End everything at once, without grace. Callable from a signal handler."""
        self.request_stop()
        self._spawner.kill_all()

    # -- the launcher's thread ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            ready_by = time.monotonic() + self._start_timeout_s
            self._spawner.start_coordinator(self._inbox)
            self._loop(ready_by)
        except LaunchError as error:
            self._failure = error
        except Exception as error:
            log.exception("the launcher failed")
            self._failure = LaunchError(f"the launcher failed: {error!r}")
        finally:
            self._spawner.close(0.5 if self._failure and not self._ready else self._stop_grace_s)
            if self._channel is not None:
                self._channel.close()
            self._inbox.close()
            with self._changed:
                self._done = True
                self._changed.notify_all()

    def _loop(self, ready_by: float) -> None:
        while not self._stop:
            self._wait(_IDLE_WAIT_S if self._ready else ready_by - time.monotonic())
            for event in self._inbox.take():
                self._on_event(event)
            for message in self._channel.receive() if self._channel else ():
                self._on_message(message)
            if self._ready is None and time.monotonic() >= ready_by:
                raise LaunchError(
                    f"not ready within {self._start_timeout_s:g} s: {self._missing()}"
                )

    def _wait(self, timeout_s: float) -> None:
        poller = zmq.Poller()
        poller.register(self._inbox.fileno(), zmq.POLLIN)
        if self._channel is not None:
            poller.register(self._channel.socket, zmq.POLLIN)
        poller.poll(max(int(timeout_s * 1000) + 1, 0))

    def _on_event(self, event: Event) -> None:
        match event:
            case StopRequested():
                self._stop = True
            case CoordinatorUp(control_endpoint):
                self._control_endpoint = control_endpoint
                self._channel = _Channel(control_endpoint, _hello(), self._keys)
            case Exited():
                self._on_exit(event)

    def _on_exit(self, exited: Exited) -> None:
        expected = exited.launch_id in self._stopping
        self._stopping.discard(exited.launch_id)
        self._places.pop(exited.launch_id, None)
        if exited.launch_id == COORDINATOR or (self._ready is None and not expected):
            raise LaunchError(str(exited))
        if not expected:
            log.warning("%s", exited)
        assert self._channel is not None
        self._channel.send(
            ProcessExited(exited.launch_id, exited.pid, exited.exit_code, exited.last_lines)
        )

    def _on_message(self, message: ToLauncher) -> None:
        match message:
            case Welcome():
                log.debug("joined coordinator epoch %s", message.epoch)
            case Reject():
                raise LaunchError(f"the coordinator refused its launcher: {message.reason}")
            case Start():
                self._start_worker(message)
            case Stop() if message.launch_id in self._places:
                self._stopping.add(message.launch_id)
                self._spawner.stop(message.launch_id, message.grace_s)
            case Stop():
                log.info("asked to stop %s, which is not running", message.launch_id)
            case Ready():
                with self._changed:
                    self._ready = message
                    self._changed.notify_all()

    def _start_worker(self, message: Start) -> None:
        assert self._control_endpoint is not None
        if message.launch_id in self._places:
            return
        place = WorkerPlace(message.role, message.launch_id, self._free_slot(message.role))
        self._places[message.launch_id] = place
        try:
            self._spawner.start(place, self._control_endpoint)
        except LaunchError as error:
            self._on_exit(Exited(message.launch_id, 0, 1, str(error)))

    def _free_slot(self, role: Role) -> int:
        taken = {place.slot for place in self._places.values() if place.role == role}
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)

    def _missing(self) -> str:
        if self._control_endpoint is None:
            return "the coordinator did not bind its control socket"
        return f"started {', '.join(self._places) or 'no worker'}; some are not ready"


def _hello() -> Hello:
    worker_id = f"launcher-{uuid.uuid4().hex[:12]}"
    return Hello(worker_id, "launcher", worker_id, os.getpid(), socket.gethostname())


class _Channel:
    """The launcher's end of the control channel."""

    def __init__(self, endpoint: str, hello: Hello, keys: CurveKeys | None) -> None:
        self._context = zmq.Context()
        self.socket = dealer(self._context, endpoint, hello.worker_id.encode(), keys)
        self._decoder = decoder_for(ToLauncher)
        self.send(hello)

    def send(self, message: ToCoordinator) -> None:
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            log.error("the coordinator does not read; lost %s", type(message).__name__)

    def receive(self) -> list[ToLauncher]:
        """All messages that are here, without waiting. What is none is logged and dropped."""
        messages: list[ToLauncher] = []
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
