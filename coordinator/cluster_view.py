"""The cluster as GET /cluster and GET /metrics show it."""

from __future__ import annotations

import dataclasses
from typing import Any

from coordinator.pools import Launch, Lineage
from coordinator.registry import Worker
from coordinator.state import State
from splitserve.cluster_metrics import ClusterSample, WorkerSample
from splitserve.config import CoordinatorConfig
from splitserve.wire.messages import WorkerStats

_NOTHING = dataclasses.asdict(WorkerStats())


def cluster_view(state: State, config: CoordinatorConfig, pid: int, now: float) -> dict[str, Any]:
    """What GET /cluster answers."""
    requests, workers = state.requests, state.registry.workers.values()
    said_hello = {worker.launch_id for worker in workers}
    unborn = [x for x in state.pools.launches.values() if x.launch_id not in said_hello]
    limits = state.registry.limits
    return {
        "model": config.served_model_names[0],
        "target": dict(state.pools.targets),
        "coordinator": {
            "epoch": state.settings.epoch,
            "pid": pid,
            "ready": state.ready,
            "num_requests_in_flight": requests.legs.num_in_flight,
            "num_requests_waiting": len(requests.line),
            "num_local_prefills": state.dispatcher.num_local_prefills,
            "num_wasted_tokens": requests.num_wasted_tokens,
            "num_restarts": requests.num_restarts,
            "previous_end": config.previous_end or None,
            "limits": None if limits is None else dataclasses.asdict(limits),
        },
        "workers": [
            *(_worker(worker, now) for worker in workers),
            *(_starting(launch) for launch in unborn),
        ],
        "failures": [_failure(lineage) for lineage in state.pools.failed],
    }


def cluster_sample(state: State, num_protocol_errors: int) -> ClusterSample:
    """What a scrape of GET /metrics reads."""
    return ClusterSample(
        workers=[WorkerSample(w.worker_id, w.role, w.stats) for w in state.registry.alive()],
        num_requests_in_flight=state.requests.legs.num_in_flight,
        num_requests_waiting=len(state.requests.line),
        num_local_prefills=state.dispatcher.num_local_prefills,
        num_wasted_tokens=state.requests.num_wasted_tokens,
        num_protocol_errors=num_protocol_errors,
    )


def _worker(worker: Worker, now: float) -> dict[str, Any]:
    return {
        "worker_id": worker.worker_id,
        "role": worker.role,
        "state": worker.state,
        "pid": worker.pid,
        "host": worker.host,
        "launch_id": worker.launch_id,
        "device": worker.facts.device,
        "num_threads": worker.facts.num_threads,
        "heartbeat_age_s": round(max(0.0, now - worker.heartbeat_at), 3),
        "reason": worker.death or None,
        **dataclasses.asdict(worker.stats),
        "bottleneck": worker.stats.evidence and worker.stats.evidence.bottleneck,
    }


def _failure(lineage: Lineage) -> dict[str, Any]:
    """The first death of a worker's process, and what became of it."""
    return {
        "launch_id": lineage.first_launch_id,
        "role": lineage.role,
        "reason": lineage.reason,
        "last_lines": lineage.last_lines,
        "num_failures": lineage.num_failures,
        "given_up": lineage.given_up,
    }


def _starting(launch: Launch) -> dict[str, Any]:
    """A process that has not said Hello has no worker_id yet; its launch_id stands for it."""
    return {
        "worker_id": launch.launch_id,
        "role": launch.role,
        "state": "draining" if launch.stopping else "starting",
        "pid": None,
        "host": None,
        "launch_id": launch.launch_id,
        **_NOTHING,
    }
