"""Metrics that are read off the cluster at each scrape, never copied into counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from splitserve.profiling.classify import share
from splitserve.profiling.evidence import BOTTLENECKS, PHASES, Evidence
from splitserve.wire.messages import WorkerStats

COORDINATOR = "coordinator"
LABELS = ("model_name", "role", "worker_id")
PREFIX = "splitserve_"


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """A living worker at the moment of a scrape."""

    worker_id: str
    role: str
    stats: WorkerStats


@dataclass(frozen=True, slots=True)
class ClusterSample:
    """The cluster at the moment of a scrape."""

    workers: Sequence[WorkerSample]
    num_requests_in_flight: int
    num_requests_waiting: int
    num_local_prefills: int
    num_wasted_tokens: int
    num_protocol_errors: int


Values = Iterable[tuple[tuple[str, ...], float]]  # (role, worker_id, further labels …), value


class ClusterCollector(Collector):
    """Series of a cluster that is asked for its state when somebody scrapes."""

    def __init__(self, model_name: str, sample: Callable[[], ClusterSample]) -> None:
        self._model_name = model_name
        self._sample = sample

    def collect(self) -> Iterator[Metric]:
        cluster = self._sample()
        yield from self._loads(cluster)
        yield from self._counters(cluster)
        yield from self._bottlenecks(cluster)

    def _loads(self, cluster: ClusterSample) -> Iterator[Metric]:
        own = (COORDINATOR, COORDINATOR)
        workers = [((w.role, w.worker_id), w.stats) for w in cluster.workers]
        running = [(own, float(cluster.num_requests_in_flight))]
        waiting = [(own, float(cluster.num_requests_waiting))]
        running += [(labels, float(s.num_requests_running)) for labels, s in workers]
        waiting += [(labels, float(s.num_requests_waiting)) for labels, s in workers]
        yield self._gauge("num_requests_running", "Requests being computed.", running)
        yield self._gauge("num_requests_waiting", "Requests waiting for room.", waiting)
        usage = [(labels, _usage(s)) for labels, s in workers]
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage)

    def _counters(self, cluster: ClusterSample) -> Iterator[Metric]:
        own = (COORDINATOR, COORDINATOR)
        for name, field in _WORKER_COUNTERS.items():
            values = [
                ((w.role, w.worker_id), float(getattr(w.stats, field))) for w in cluster.workers
            ]
            yield self._counter(name, f"{field} of a worker, since its start.", values)
        for name, text in _OWN_COUNTERS.items():
            yield self._counter(name, text, [(own, float(getattr(cluster, name)))])

    def _bottlenecks(self, cluster: ClusterSample) -> Iterator[Metric]:
        """What binds each worker, and why we say so: its last whole window."""
        known = [
            ((w.role, w.worker_id), w.stats.evidence) for w in cluster.workers if w.stats.evidence
        ]
        yield self._gauge(
            "worker_bottleneck",
            "1 for what binds the worker now, 0 for the other classes.",
            [
                ((*worker, name), float(evidence.bottleneck == name))
                for worker, evidence in known
                for name in BOTTLENECKS
            ],
            "bottleneck",
        )
        yield self._gauge(
            "worker_time_share",
            "Share of the worker's time that went into a phase of its loop, 0 to 1.",
            [
                ((*worker, phase), share(getattr(evidence, f"{phase}_s"), evidence.window_s))
                for worker, evidence in known
                for phase in PHASES
            ],
            "phase",
        )
        yield self._gauge(
            "worker_roof_share",
            "Achieved over peak while the model ran: memory bandwidth and FLOP/s, 0 to 1.",
            [
                ((*worker, roof), share(floor_s, evidence.forward_s))
                for worker, evidence in known
                for roof, floor_s in _floors(evidence)
            ],
            "roof",
        )
        occupancy = [
            (worker, share(evidence.num_slots_used, evidence.num_slots_allowed))
            for worker, evidence in known
        ]
        text = "Share of the batch's slots that steps used, 0 to 1."
        yield self._gauge("worker_batch_occupancy", text, occupancy)

    def _gauge(self, name: str, text: str, values: Values, *more_labels: str) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=(*LABELS, *more_labels))
        for labels, value in values:
            family.add_metric((self._model_name, *labels), value)
        return family

    def _counter(self, name: str, text: str, values: Values) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=LABELS)
        for labels, value in values:
            family.add_metric((self._model_name, *labels), value)
        return family


# Bytes are counted where they arrive, so that a sum over workers counts each once.
_WORKER_COUNTERS = {
    "num_preemptions": "num_preemptions",
    "prefix_cache_queries": "num_prefix_queries",
    "prefix_cache_hits": "num_prefix_hits",
    "kv_transfer_bytes": "num_kv_bytes_received",
    "num_tokens_prefilled": "num_tokens_prefilled",
    "num_tokens_decoded": "num_tokens_decoded",
    "num_frames_dropped": "num_frames_dropped",
    "num_steps": "num_steps",
}
_OWN_COUNTERS = {
    "num_local_prefills": "Prompts that a decode worker was asked to compute itself.",
    "num_wasted_tokens": "Tokens sampled for choices that had already ended.",
    "num_protocol_errors": "Malformed messages on the control channel.",
}


def _usage(stats: WorkerStats) -> float:
    total = stats.num_blocks_total
    return 1.0 - (stats.num_blocks_free + stats.num_blocks_cached) / total if total else 0.0


def _floors(evidence: Evidence) -> tuple[tuple[str, float], ...]:
    return ("memory", evidence.memory_floor_s), ("compute", evidence.compute_floor_s)
