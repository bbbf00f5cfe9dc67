"""The launcher: a peer of the coordinator that starts, stops and reaps processes for it.

    Launcher ──start──► Spawner ──► coordinator, workers         (local.py, ray_workers.py)
       ▲  ▲                │ CoordinatorUp, Exited
       │  └── Inbox ◄──────┘
       └── DEALER ── Hello, ProcessExited ──► coordinator ── Start, Stop, Targets, Ready ──► back

One thread runs it all and waits in one place, for a message or for something in the inbox. What it
does for the coordinator's own life is in coordinator_life.py.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import zmq

from splitserve.config import CurveKeys, Role
from splitserve.errors import LaunchError
from splitserve.launch.child import Exited
from splitserve.launch.coordinator_life import CoordinatorLife
from splitserve.launch.plan import WorkerPlace
from splitserve.launch.spawner import (
    COORDINATOR,
    CoordinatorUp,
    Event,
    Inbox,
    Spawner,
    StopRequested,
)
from splitserve.wire import messages as m

if TYPE_CHECKING:
    from splitserve.settings import ServeSettings

log = logging.getLogger(__name__)


class Launcher:
    """Owns the life of one cluster: from the coordinator's start until everything is reaped."""

    def __init__(
        self,
        spawner: Spawner,
        settings: ServeSettings,
        keys: CurveKeys | None = None,
        cluster_token: str = "",
    ) -> None:
        self._spawner = spawner
        self._start_timeout_s = settings.start_timeout_s
        self._stop_grace_s = settings.stop_grace_s
        self._inbox = Inbox()
        self._coordinator = CoordinatorLife(
            spawner, self._inbox, settings, keys, cluster_token, self._launches
        )
        self._places: dict[str, WorkerPlace] = {}  # workers not yet seen to exit
        self._started_at: dict[str, float] = {}
        self._to_start: dict[str, m.Start] = {}  # one a turn, so that there is time for news
        self._stopping: set[str] = set()  # those we were told to stop
        self._ready: m.Ready | None = None
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
            self._coordinator.start()
            self._loop(ready_by)
        except LaunchError as error:
            self._failure = error
        except Exception as error:
            log.exception("the launcher failed")
            self._failure = LaunchError(f"the launcher failed: {error!r}")
        finally:
            self._spawner.close(0.5 if self._failure and not self._ready else self._stop_grace_s)
            self._coordinator.close()
            self._inbox.close()
            with self._changed:
                self._done = True
                self._changed.notify_all()

    def _loop(self, ready_by: float) -> None:
        while not self._stop:
            self._wait(None if self._ready else ready_by)
            for message in self._coordinator.receive():  # before the news of its end
                self._on_message(message)
            for event in self._inbox.take():
                self._on_event(event)
            if self._to_start and not self._stop:
                self._start_worker(self._to_start.pop(next(iter(self._to_start))))
            now = time.monotonic()
            if not self._stop:
                self._coordinator.turn(now)
            if self._ready is None and now >= ready_by:
                raise LaunchError(
                    f"not ready within {self._start_timeout_s:g} s: {self._missing()}"
                )

    def _wait(self, ready_by: float | None) -> None:
        poller = zmq.Poller()
        poller.register(self._inbox.fileno(), zmq.POLLIN)
        if self._coordinator.socket is not None:
            poller.register(self._coordinator.socket, zmq.POLLIN)
        times = [t for t in (ready_by, self._coordinator.due_at) if t is not None]
        timeout_s = min(times) - time.monotonic() if times else None
        timeout_s = 0.0 if self._to_start else timeout_s
        poller.poll(None if timeout_s is None else max(int(timeout_s * 1000) + 1, 0))

    def _on_event(self, event: Event) -> None:
        match event:
            case StopRequested():
                self._stop = True
            case CoordinatorUp(control_endpoint):
                self._coordinator.came_up(control_endpoint)
            case Exited() if self._stop:
                log.debug("%s", event)
            case Exited(launch_id=launch_id) if launch_id == COORDINATOR:
                self._to_start.clear()
                self._coordinator.exited(event)
            case Exited():
                self._on_exit(event)

    def _on_exit(self, exited: Exited) -> None:
        expected = exited.launch_id in self._stopping
        self._stopping.discard(exited.launch_id)
        self._places.pop(exited.launch_id, None)
        self._started_at.pop(exited.launch_id, None)
        if self._ready is None and not expected:
            raise LaunchError(str(exited))
        if not expected and exited.exit_code == 0:
            log.info("%s has left", exited.launch_id)
        elif not expected:
            log.warning("%s", exited)
        known = self._coordinator.send(
            m.ProcessExited(exited.launch_id, exited.pid, exited.exit_code, exited.last_lines)
        )
        if not known:  # the next one learns from our Hello what is left
            log.debug("no coordinator to tell that %s has ended", exited.launch_id)

    def _on_message(self, message: m.ToLauncher) -> None:
        self._coordinator.take(message)
        match message:
            case m.Start():
                self._to_start[message.launch_id] = message
            case m.Stop() if self._to_start.pop(message.launch_id, None):
                self._coordinator.send(m.ProcessExited(message.launch_id, 0, 0, ""))
            case m.Stop() if message.launch_id in self._places:
                self._stopping.add(message.launch_id)
                self._spawner.stop(message.launch_id, message.grace_s)
            case m.Stop():
                log.info("asked to stop %s, which is not running", message.launch_id)
            case m.Ready():
                with self._changed:
                    self._ready = message
                    self._changed.notify_all()
            case _:
                pass  # about the coordinator itself

    def _start_worker(self, message: m.Start) -> None:
        launch_id = message.launch_id
        if launch_id in self._places:
            return
        endpoint = self._coordinator.control_endpoint
        assert endpoint is not None
        place = WorkerPlace(message.role, launch_id, self._free_slot(message.role))
        self._places[launch_id] = place
        self._started_at[launch_id] = time.monotonic()
        try:
            self._spawner.start(place, endpoint)
        except LaunchError as error:
            self._on_exit(Exited(launch_id, 0, 1, str(error)))

    def _free_slot(self, role: Role) -> int:
        taken = {place.slot for place in self._places.values() if place.role == role}
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)

    def _launches(self) -> tuple[m.Launched, ...]:
        """The workers that run here."""
        now = time.monotonic()
        return tuple(
            m.Launched(name, place.role, now - self._started_at[name], name in self._stopping)
            for name, place in self._places.items()
        )

    def _missing(self) -> str:
        if self._coordinator.control_endpoint is None:
            return "the coordinator did not bind its control socket"
        return f"started {', '.join(self._places) or 'no worker'}; some are not ready"
