"""What runs on a node that something else picked: a worker supervised there, or the launcher.

Nothing here imports Ray: launch/ray_cluster.py and ray_workers.py turn it into actors.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import secrets
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from splitserve.config import WorkerConfig
from splitserve.errors import LaunchError, SplitserveError
from splitserve.launch.child import ChildProcess, Exited
from splitserve.launch.launcher import Launcher
from splitserve.launch.local import worker_spec
from splitserve.launch.plan import LaunchPlan
from splitserve.launch.spawner import Spawner

if TYPE_CHECKING:
    from splitserve.settings import PoolSettings, ServeSettings

_ACCELERATOR_SHARE = 0.001  # how Ray spells "on a node with this accelerator"


class HostedWorker:
    """Owns one worker process of a cluster on the node it was sent to."""

    def __init__(self, node_host: str, device: str) -> None:
        self._node_host = node_host
        self._device = device
        self._exits: queue.SimpleQueue[Exited] = queue.SimpleQueue()
        self._child: ChildProcess | None = None
        self._grace_s: float | None = None  # set: told to stop, maybe before it began

    def run(self, config: WorkerConfig) -> Exited:
        """Run a worker until it exits. `config.engine.model` is a name, resolved here."""
        from splitserve.models import resolve_model

        try:
            model_dir = str(resolve_model(config.engine.model).directory)
            local = dataclasses.replace(
                config,
                engine=dataclasses.replace(config.engine, model=model_dir),
                bind_host=self._node_host,
                device=self._device,
                parent_pid=os.getpid(),
            )
            self._child = ChildProcess(worker_spec(local), self._exits.put)
        except SplitserveError as error:
            return Exited(config.launch_id, os.getpid(), 1, str(error))
        if self._grace_s is not None:
            self._child.stop(self._grace_s)
        return self._exits.get()

    def stop(self, grace_s: float) -> None:
        """SIGTERM now, SIGKILL after the grace."""
        self._grace_s = grace_s
        if self._child is not None:
            self._child.stop(grace_s)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How a start ended: a base URL, or why there is none."""

    base_url: str | None = None
    failure: str | None = None


class HostedLauncher:
    """Owns a cluster whose workers are on many nodes; its coordinator is on this one."""

    def __init__(
        self,
        settings: ServeSettings,
        node_host: str,
        make_spawner: Callable[[LaunchPlan], Spawner],
    ) -> None:
        self._settings = settings
        self._node_host = node_host
        self._make_spawner = make_spawner
        self._launcher: Launcher | None = None

    def bring_up(self) -> Outcome:
        """Start everything; returns when it is ready or has failed."""
        from splitserve.logs import set_up_logging
        from splitserve.models import resolve_model

        settings = for_ray(self._settings)
        set_up_logging("launcher", settings.log_level)
        from splitserve.wire.curve import make_keys

        try:
            keys, token = make_keys(), secrets.token_hex(16)
            plan = LaunchPlan(
                settings=settings,
                model_dir=str(resolve_model(settings.model).directory),
                cores=(),
                keys=keys,
                cluster_token=token,
                host=self._node_host,
                parent_pid=os.getpid(),
                worker_model=settings.model,  # every node resolves it for itself
            )
            self._launcher = Launcher(self._make_spawner(plan), settings, keys, token)
            return Outcome(base_url=self._launcher.start())
        except SplitserveError as error:
            return Outcome(failure=str(error))

    def stop_grace_s(self) -> float:
        """From SIGTERM to SIGKILL, as this cluster was told at its start."""
        return self._settings.stop_grace_s

    def has_ended(self) -> bool:
        return self._launcher is not None and self._launcher.wait(0.0)

    def stop(self) -> None:
        """Returns when every process is gone."""
        if self._launcher is not None:
            self._launcher.stop()


def bundle_of(pool: PoolSettings) -> dict[str, float]:
    """What Ray sets aside for one worker of a pool. Raises LaunchError when that is nothing."""
    bundle = {"CPU": pool.num_cpus, "GPU": pool.num_gpus, **(pool.resources or {})}
    if pool.accelerator_type:
        bundle[f"accelerator_type:{pool.accelerator_type}"] = _ACCELERATOR_SHARE
    bundle = {name: amount for name, amount in bundle.items() if amount > 0}
    if not bundle:
        raise LaunchError("a worker must ask Ray for something: num_cpus, num_gpus or resources")
    return bundle


def describe_bundles(bundles: list[dict[str, float]], labels: list[dict[str, str]]) -> str:
    """Bundles in words, equal ones counted."""
    counts = Counter(
        ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
        + (f" on a node with {label}" if label else "")
        for bundle, label in zip(bundles, labels, strict=True)
    )
    return " and ".join(f"{count} x ({what})" for what, count in counts.items())


def for_ray(settings: ServeSettings) -> ServeSettings:
    """The settings as workers on Ray need them: threads and GPU memory as Ray shares them."""

    def pool(own: PoolSettings) -> PoolSettings:
        share = own.num_gpus if 0 < own.num_gpus < 1 else 1.0
        engine = dataclasses.replace(
            own.engine,
            num_threads=own.engine.num_threads or max(int(own.num_cpus), 1),
            gpu_memory_utilization=own.engine.gpu_memory_utilization * share,
        )
        return dataclasses.replace(own, engine=engine, devices=())

    return dataclasses.replace(
        settings, prefill=pool(settings.prefill), decode=pool(settings.decode)
    )
