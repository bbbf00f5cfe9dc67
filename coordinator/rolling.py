"""A rolling restart: one worker after the other, each behind a replacement that is ready. Pure."""

from __future__ import annotations

from coordinator.pools import Launch, Pools
from coordinator.registry import Registry, Worker
from splitserve.config import Role


class RollingRestart:
    """Owns which workers are still to be replaced, in order."""

    def __init__(self, registry: Registry, pools: Pools) -> None:
        self._registry = registry
        self._pools = pools
        self._worker_ids: list[str] = []

    def begin(self, role: Role) -> list[str]:
        """Every worker of a pool is to be replaced; their worker_ids."""
        replaced = self._registry.takers(role)
        for worker in replaced:
            if not worker.to_be_replaced:
                worker.to_be_replaced = True
                self._worker_ids.append(worker.worker_id)
        return [worker.worker_id for worker in replaced]

    def end(self) -> None:
        """Nobody else is replaced. What was started for it is a worker like any other."""
        while self._worker_ids:
            self._done_with_first()

    def step(self, now: float) -> Launch | Worker | None:
        """A launch to start, or a worker that is to leave, if it is time for one of them."""
        while self._worker_ids:
            worker = self._registry.workers.get(self._worker_ids[0])
            if worker is None or worker.state == "dead":
                self._done_with_first()
                continue
            if worker.state == "draining":
                return None
            launch = self._pools.replacement_of(worker)
            if launch is None:
                return self._pools.start_replacement(worker, now)
            ready = {one.launch_id for one in self._registry.takers(worker.role)}
            if launch.launch_id not in ready:
                return None
            launch.replaces = None
            return worker
        return None

    def _done_with_first(self) -> None:
        worker_id = self._worker_ids.pop(0)
        self._pools.keep_replacement(worker_id)
        if worker := self._registry.workers.get(worker_id):
            worker.to_be_replaced = False
