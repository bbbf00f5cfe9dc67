"""What each process of a cluster is told: configs of roles, and which cores a worker gets.

A *slot* is a place for a worker in its pool: 0, 1, ... A worker that replaces a dead one takes its
slot, and so its cores and its GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitserve.config import CoordinatorConfig, CurveKeys, Promises, Role, WorkerConfig

if TYPE_CHECKING:
    from splitserve.settings import ServeSettings


@dataclass(frozen=True, slots=True)
class CoreShare:
    """What one worker gets of a machine: CPUs to stay on (None: unpinned), and threads."""

    cores: tuple[int, ...] | None
    num_threads: int


UNPINNED = CoreShare(cores=None, num_threads=1)


def share_cores(asked: Sequence[int | None], cores: Sequence[int]) -> tuple[CoreShare, ...]:
    """Divide the CPUs `cores` among workers; `asked` has each one's --num-threads, or None.

    Disjoint sets with one thread a core while they fit; else everyone unpinned, one thread each
    unless told otherwise.
    """
    fair = len(cores) // max(len(asked), 1)
    wanted = [fair if num_threads is None else num_threads for num_threads in asked]
    if 0 in wanted or sum(wanted) > len(cores):
        return tuple(CoreShare(None, num_threads or 1) for num_threads in asked)
    shares, start = [], 0
    for num_threads in wanted:
        shares.append(CoreShare(tuple(cores[start : start + num_threads]), num_threads))
        start += num_threads
    return tuple(shares)


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Which worker is meant: a `launch_id` made by the coordinator, in a slot of its pool."""

    role: Role
    launch_id: str
    slot: int


@dataclass(frozen=True, slots=True)
class Comeback:
    """What a coordinator that replaces a dead one takes over: its ports, its promises, and how
    many workers were wanted last. `previous_end` is how the first of those before it ended."""

    port: int
    control_port: int
    num_prefill: int
    num_decode: int
    promises: Promises
    previous_end: str


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Makes the config of each role from the settings, a resolved model and the machine's CPUs."""

    settings: ServeSettings
    model_dir: str
    cores: tuple[int, ...]
    keys: CurveKeys | None = None  # None: sockets stay on loopback
    cluster_token: str = ""
    host: str = "127.0.0.1"  # where control and data sockets bind
    parent_pid: int | None = None
    worker_model: str | None = None  # what workers are told instead of model_dir

    def coordinator(self, comeback: Comeback | None = None) -> CoordinatorConfig:
        """The first one's config, or that of one that comes back after a death."""
        first = self._first_coordinator()
        if comeback is None:
            return first
        taken_over = {f.name: getattr(comeback, f.name) for f in dataclasses.fields(comeback)}
        return dataclasses.replace(first, successor=True, **taken_over)

    def _first_coordinator(self) -> CoordinatorConfig:
        settings = self.settings
        return CoordinatorConfig(
            model=self.model_dir,
            model_name=settings.model,
            served_model_names=settings.served_model_names,
            host=settings.host,
            port=settings.port,
            api_keys=settings.api_keys,
            control_host=self.host,
            num_prefill=settings.prefill.num_workers,
            num_decode=settings.decode.num_workers,
            router=settings.router,
            max_queue=settings.max_queue,
            request_timeout_s=settings.request_timeout_s,
            generation_config=settings.generation_config,
            liveness=settings.liveness,
            keys=self.keys,
            cluster_token=self.cluster_token,
            max_restarts=settings.max_restarts,
            start_timeout_s=settings.start_timeout_s,
            drain_grace_s=settings.drain_grace_s,
            parent_pid=self.parent_pid,
            log_level=settings.log_level,
        )

    def worker(self, place: WorkerPlace, control_endpoint: str) -> WorkerConfig:
        settings, pool = self.settings, self.settings.pool(place.role)
        share = self.share(place.role, place.slot)
        engine = dataclasses.replace(
            pool.engine,
            model=self.worker_model or self.model_dir,
            num_threads=share.num_threads,
            gpu_memory_utilization=pool.engine.gpu_memory_utilization / self._sharers(place),
        )
        return WorkerConfig(
            role=place.role,
            engine=engine,
            control_endpoint=control_endpoint,
            launch_id=place.launch_id,
            bind_host=self.host,
            device=self._device(place),
            cores=share.cores,
            transport=settings.transport,
            liveness=settings.liveness,
            keys=self.keys,
            cluster_token=self.cluster_token,
            drain_grace_s=settings.drain_grace_s,
            parent_pid=self.parent_pid,
            log_level=settings.log_level,
        )

    def share(self, role: Role, slot: int) -> CoreShare:
        """A worker's CPUs. A slot beyond the numbers at start gets one unpinned thread."""
        prefill, decode = self.settings.prefill, self.settings.decode
        asked = [prefill.engine.num_threads] * prefill.num_workers
        asked += [decode.engine.num_threads] * decode.num_workers
        if slot >= self.settings.pool(role).num_workers:
            own = self.settings.pool(role).engine.num_threads
            return UNPINNED if own is None else CoreShare(None, own)
        place = slot if role == "prefill" else prefill.num_workers + slot
        return share_cores(asked, self.cores)[place]

    def _device(self, place: WorkerPlace) -> str:
        devices = self.settings.pool(place.role).devices
        return f"cuda:{devices[place.slot % len(devices)]}" if devices else "cpu"

    def _sharers(self, place: WorkerPlace) -> int:
        """How many workers at start use this worker's GPU, itself included; 1 on CPU."""
        mine, count = self._device(place), 0
        if mine == "cpu":
            return 1
        for role in ("prefill", "decode"):
            devices = self.settings.pool(role).devices
            for slot in range(self.settings.pool(role).num_workers if devices else 0):
                count += f"cuda:{devices[slot % len(devices)]}" == mine
        return max(count, 1)
