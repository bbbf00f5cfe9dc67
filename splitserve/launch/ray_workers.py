"""Workers on Ray: an actor for each, in a bundle of a placement group, supervises one process."""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from splitserve.config import WorkerConfig
from splitserve.errors import LaunchError
from splitserve.launch.child import Exited
from splitserve.launch.hosted import HostedWorker, bundle_of, describe_bundles
from splitserve.launch.local import KILL_WAIT_S, ORPHAN_GRACE_S, CoordinatorProcess
from splitserve.launch.plan import Comeback, LaunchPlan, WorkerPlace
from splitserve.launch.spawner import Inbox, Spawner

if TYPE_CHECKING:
    from splitserve.settings import PoolSettings, RaySettings

_CALL_TIMEOUT_S = 60.0  # a short call to an actor that runs
_WAIT_S = 60.0  # one wait of an endless series
_PATIENCE_S = 2.0  # with Ray, before somebody hears that there is no room

log = logging.getLogger(__name__)


class WorkerActor(HostedWorker):
    """A worker on the node that Ray picked, which shows it its own GPU only."""

    def __init__(self) -> None:
        super().__init__(node_host(), "cuda:0" if ray.get_gpu_ids() else "cpu")

    def is_here(self) -> bool:
        """Answers as soon as Ray has placed and started this actor."""
        return True


@dataclasses.dataclass(slots=True)
class _Worker:
    """A worker being placed, run, or stopped, by a thread of its own."""

    thread: threading.Thread
    actor: Any = None
    grace_s: float | None = None  # set: told to stop


class RaySpawner(Spawner):
    """Owns the placement groups, worker actors and coordinator process of one cluster."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._settings = plan.settings
        self._coordinator = CoordinatorProcess()
        self._inbox: Inbox | None = None
        self._group: PlacementGroup | None = None
        self._workers: dict[str, _Worker] = {}
        self._lock = threading.Lock()  # over _Worker.actor and .grace_s

    def start_coordinator(self, inbox: Inbox, comeback: Comeback | None) -> None:
        self._inbox = inbox
        settings = self._settings
        if self._group is None:  # else the workers are where they were
            pools = [settings.prefill] * settings.prefill.num_workers
            pools += [settings.decode] * settings.decode.num_workers
            self._group = _reserve(pools, settings.ray, lambda: inbox.asked_to_stop)
        self._coordinator.start(self._plan.coordinator(comeback), inbox)

    def kill_coordinator(self) -> None:
        self._coordinator.kill()

    def start(self, place: WorkerPlace, control_endpoint: str) -> None:
        arguments = (place, self._plan.worker(place, control_endpoint))
        thread = threading.Thread(target=self._run_worker, args=arguments, daemon=True)
        self._workers[place.launch_id] = _Worker(thread)
        thread.start()

    def stop(self, launch_id: str, grace_s: float) -> None:
        worker = self._workers.get(launch_id)
        if worker is None:
            return
        with self._lock:
            worker.grace_s = grace_s
            if worker.actor is not None:
                _tell_to_stop(worker.actor, grace_s)

    def close(self, grace_s: float) -> None:
        self._coordinator.close(grace_s)
        workers = dict(self._workers)
        worker_grace_s = min(grace_s, ORPHAN_GRACE_S)
        for launch_id in workers:
            self.stop(launch_id, worker_grace_s)
        deadline = time.monotonic() + worker_grace_s + KILL_WAIT_S
        for worker in workers.values():
            worker.thread.join(max(deadline - time.monotonic(), 0.0))
        self._kill_actors()
        if self._group is not None:
            remove_placement_group(self._group)

    def kill_all(self) -> None:
        self._kill_actors()
        self._coordinator.kill()

    def _kill_actors(self) -> None:
        for worker in list(self._workers.values()):
            if worker.actor is not None:
                ray.kill(worker.actor)

    def _run_worker(self, place: WorkerPlace, config: WorkerConfig) -> None:
        """The life of a worker, from a bundle for it to the news of its exit."""
        assert self._inbox is not None
        own_group = None
        try:
            group, index = self._bundle(place)
            own_group = group if group is not self._group else None
            exited = self._run_actor(place, config, (group, index))
        except Exception as error:  # whatever it is, the launcher must hear of it
            exited = Exited(place.launch_id, 0, 1, str(error) or repr(error))
        if own_group is not None:
            remove_placement_group(own_group)
        self._workers.pop(place.launch_id)
        self._inbox.post(exited)

    def _bundle(self, place: WorkerPlace) -> tuple[PlacementGroup, int]:
        """Where a worker goes: its bundle of the first group, or a group of its own."""
        settings = self._settings
        pool = settings.pool(place.role)
        if place.slot >= pool.num_workers:
            worker = self._workers[place.launch_id]
            return _reserve([pool], settings.ray, lambda: worker.grace_s is not None), 0
        assert self._group is not None
        before = 0 if place.role == "prefill" else settings.prefill.num_workers
        return self._group, before + place.slot

    def _run_actor(
        self, place: WorkerPlace, config: WorkerConfig, bundle: tuple[PlacementGroup, int]
    ) -> Exited:
        pool = self._settings.pool(place.role)
        asked = bundle_of(pool)
        actor: Any = (
            ray.remote(WorkerActor)
            .options(
                num_cpus=asked.pop("CPU", 0),
                num_gpus=asked.pop("GPU", 0),
                resources=asked,
                scheduling_strategy=PlacementGroupSchedulingStrategy(*bundle),
                max_concurrency=4,
            )
            .remote()
        )
        worker = self._workers[place.launch_id]
        with self._lock:
            worker.actor = actor
            told_to_stop = worker.grace_s
        try:
            self._wait_for_room(actor, place)
            running = actor.run.remote(config)
            if told_to_stop is not None:
                _tell_to_stop(actor, told_to_stop)
            return _result_of(running, place.launch_id)
        finally:
            ray.kill(actor)

    def _wait_for_room(self, actor: Any, place: WorkerPlace) -> None:
        """The bundle may have been lost with its node. Raises LaunchError, or an error of Ray's
        when the actor was killed meanwhile."""
        timeout_s = self._settings.ray.placement_timeout_s
        try:
            ray.get(actor.is_here.remote(), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise LaunchError(
                f"Ray did not place {place.launch_id} within {timeout_s:g} s; "
                f"available {_resources()}"
            ) from error


def _tell_to_stop(actor: Any, grace_s: float) -> None:
    """Returns at once. An actor that does not obey, for its node is gone or had no room for it
    yet, is killed later; one that has ended before is not harmed by that."""
    actor.stop.remote(grace_s)
    timer = threading.Timer(grace_s + KILL_WAIT_S, ray.kill, (actor,))
    timer.daemon = True
    timer.start()


def _result_of(running: Any, launch_id: str) -> Exited:
    """Wait for a worker's exit. The actor's own death (its node, `ray kill`) is one too."""
    while not ray.wait([running], timeout=_WAIT_S)[0]:
        pass
    try:
        exited: Exited = ray.get(running, timeout=_CALL_TIMEOUT_S)
    except ray.exceptions.RayActorError as error:
        return Exited(launch_id, 0, -9, f"its Ray actor died: {error}")
    except ray.exceptions.RayTaskError as error:
        return Exited(launch_id, 0, 1, f"its Ray actor failed: {error.cause!r}")
    return exited


def _reserve(
    pools: list[PoolSettings], settings: RaySettings, give_up: Callable[[], bool]
) -> PlacementGroup:
    """A placement group with one bundle a worker. Raises LaunchError when there is no room in
    time, or until it is given up."""
    bundles = [bundle_of(pool) for pool in pools]
    labels = [dict(pool.label_selector or {}) for pool in pools]
    options = {"bundle_label_selector": labels} if any(labels) else {}
    group: PlacementGroup = placement_group(bundles, strategy="PACK", **options)
    timeout_s, waited_s, missing = settings.placement_timeout_s, 0.0, ""
    while waited_s < timeout_s and not give_up():
        slice_s = min(_PATIENCE_S, timeout_s - waited_s)
        if group.wait(slice_s):
            return group
        waited_s += slice_s
        if not missing:
            missing = f"wanted {describe_bundles(bundles, labels)}; available {_resources()}"
            log.warning("waiting for Ray to make room: %s", missing)
    remove_placement_group(group)
    raise LaunchError(f"Ray could not place the workers within {waited_s:g} s: {missing}")


def _resources() -> str:
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    theirs = re.compile(r"node:|memory|object_|bundle_group_|.*_group_")
    ours = (name for name in sorted(total) if not theirs.match(name))
    return ", ".join(f"{free.get(name, 0.0):g} of {total[name]:g} {name}" for name in ours)


def node_host() -> str:
    """The address other nodes reach this one at."""
    host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return host
