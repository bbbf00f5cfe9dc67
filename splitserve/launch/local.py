"""The cluster as child processes of this one."""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from splitserve.config import (
    READY_FD_ENV,
    ROLE_CONFIG_ENV,
    CoordinatorConfig,
    WorkerConfig,
    to_json,
)
from splitserve.errors import LaunchError
from splitserve.launch.child import ChildProcess, ChildSpec, Exited, echo_to_stderr
from splitserve.launch.launcher import Launcher
from splitserve.launch.plan import Comeback, LaunchPlan, WorkerPlace
from splitserve.launch.spawner import COORDINATOR, CoordinatorUp, Inbox, Spawner
from splitserve.process import available_cores

if TYPE_CHECKING:
    from splitserve.settings import ServeSettings

KILL_WAIT_S = 10.0  # for a process that was sent SIGKILL to be reaped
# For a worker whose coordinator is gone: what it still computes, nobody hears.
ORPHAN_GRACE_S = 2.0
# What `python -m` runs for each role.
MODULES: Mapping[str, str] = {
    COORDINATOR: "coordinator",
    "prefill": "prefill_worker",
    "decode": "decode_worker",
}


class CoordinatorProcess:
    """Owns the coordinator as a child of this process, and waits for its one line.

    It can be started again once the one before was reaped.
    """

    def __init__(
        self,
        echo: Callable[[str, str], None] = echo_to_stderr,
        module: str = MODULES[COORDINATOR],
    ) -> None:
        self._echo = echo
        self._module = module
        self._child: ChildProcess | None = None

    def start(self, config: CoordinatorConfig, inbox: Inbox) -> None:
        """Start it; CoordinatorUp and Exited go to the inbox. Raises LaunchError."""
        reader, writer = os.pipe()
        environment = {ROLE_CONFIG_ENV: to_json(config), READY_FD_ENV: str(writer)}
        spec = ChildSpec(COORDINATOR, self._module, environment, pass_fds=(writer,))
        try:
            self._child = ChildProcess(spec, inbox.post, self._echo)
        except LaunchError:
            os.close(reader)
            raise
        threading.Thread(target=_read_ready_line, args=(reader, inbox), daemon=True).start()

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def close(self, grace_s: float) -> None:
        """SIGTERM, SIGKILL after the grace; returns when it is reaped."""
        if self._child is not None:
            self._child.stop(grace_s)
            self._child.wait(grace_s + KILL_WAIT_S)


def _read_ready_line(descriptor: int, inbox: Inbox) -> None:
    """Wait for one line of JSON, {"control_endpoint": ...}, and post it.

    The pipe also ends when the coordinator does; then its exit is the news.
    """
    with os.fdopen(descriptor, encoding="utf-8") as pipe:
        line = pipe.readline()
    if line:
        inbox.post(CoordinatorUp(json.loads(line)["control_endpoint"]))


class LocalSpawner(Spawner):
    """Owns the child processes of one cluster on this machine."""

    def __init__(
        self,
        plan: LaunchPlan,
        echo: Callable[[str, str], None] = echo_to_stderr,
        modules: Mapping[str, str] = MODULES,
    ) -> None:
        self._plan = plan
        self._echo = echo
        self._modules = modules
        self._inbox: Inbox | None = None
        self._coordinator = CoordinatorProcess(echo, modules[COORDINATOR])
        self._workers: dict[str, ChildProcess] = {}

    def start_coordinator(self, inbox: Inbox, comeback: Comeback | None) -> None:
        self._inbox = inbox
        self._coordinator.start(self._plan.coordinator(comeback), inbox)

    def kill_coordinator(self) -> None:
        self._coordinator.kill()

    def start(self, place: WorkerPlace, control_endpoint: str) -> None:
        spec = worker_spec(self._plan.worker(place, control_endpoint), self._modules[place.role])
        self._workers[place.launch_id] = child = ChildProcess(spec, self._on_exit, self._echo)
        if child.wait(0):  # its exit may have been told before it was entered here
            self._workers.pop(place.launch_id, None)

    def stop(self, launch_id: str, grace_s: float) -> None:
        worker = self._workers.get(launch_id)
        if worker is not None:  # else its exit is in the inbox
            worker.stop(grace_s)

    def close(self, grace_s: float) -> None:
        self._coordinator.close(grace_s)
        workers = list(self._workers.values())
        worker_grace_s = min(grace_s, ORPHAN_GRACE_S)
        for worker in workers:
            worker.stop(worker_grace_s)
        for worker in workers:
            worker.wait(worker_grace_s + KILL_WAIT_S)

    def kill_all(self) -> None:
        for worker in list(self._workers.values()):
            worker.kill()
        self._coordinator.kill()

    def _on_exit(self, exited: Exited) -> None:
        assert self._inbox is not None
        self._workers.pop(exited.launch_id, None)
        self._inbox.post(exited)


def worker_spec(config: WorkerConfig, module: str | None = None) -> ChildSpec:
    """How a worker with this config is started."""
    environment = {
        ROLE_CONFIG_ENV: to_json(config),
        "OMP_NUM_THREADS": str(config.engine.num_threads),
    }
    return ChildSpec(config.launch_id, module or MODULES[config.role], environment)


def local_launcher(
    settings: ServeSettings, echo: Callable[[str, str], None] = echo_to_stderr
) -> Launcher:
    """A launcher for this machine. Resolves the model first, which may convert a .gguf.

    Raises ModelNotFoundError.
    """
    from splitserve.models import resolve_model

    token = secrets.token_hex(16)
    plan = LaunchPlan(
        settings=settings,
        model_dir=str(resolve_model(settings.model).directory),
        cores=available_cores(),
        cluster_token=token,
        parent_pid=os.getpid(),
    )
    return Launcher(LocalSpawner(plan, echo), settings, cluster_token=token)
