"""Prometheus metrics of a cluster: vLLM's names behind `splitserve_`, and our own.

Every series carries model_name, role and worker_id; what the coordinator measures itself has role
"coordinator". What workers report is read when somebody scrapes, never copied into counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from splitserve.timeline import Timeline
from splitserve.wire.messages import WorkerStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COORDINATOR = "coordinator"
LABELS = ("model_name", "role", "worker_id")

_PREFIX = "splitserve_"
_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6,
    1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "inter_token_latency_seconds": "Between two deliveries of tokens to one choice.",
    "e2e_request_latency_seconds": "From a request's arrival to its end.",
    "request_queue_time_seconds": "Waiting in the coordinator and the worker, before prefill.",
    "request_prefill_time_seconds": "From a prompt's first forward pass to its first token.",
    "handoff_gap_seconds": "Between tokens 0 and 1 of a request that was handed over.",
    "kv_transfer_seconds": "From Grant to Received of a KV transfer.",
}


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


class Metrics:
    """Owns one registry and what is measured request by request."""

    def __init__(self, model_name: str, sample: Callable[[], ClusterSample]) -> None:
        self._registry = CollectorRegistry()
        self._own = {"model_name": model_name, "role": COORDINATOR, "worker_id": COORDINATOR}
        self._histograms = {
            name: Histogram(
                _PREFIX + name, text, LABELS, buckets=_SECONDS, registry=self._registry
            ).labels(**self._own)
            for name, text in _HISTOGRAMS.items()
        }
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, once a request.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens of answers.")
        self._success = Counter(
            f"{_PREFIX}request_success",
            "Choices that ended, by finish_reason (abort: cancelled or failed).",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._registry.register(_ClusterCollector(model_name, sample))

    def tokens_delivered(self, num_tokens: int, since_last_s: float | None) -> None:
        """Some tokens of one choice went out, so long after the ones before them."""
        self._generation_tokens.inc(num_tokens)
        if since_last_s is not None:
            self._histograms["inter_token_latency_seconds"].observe(since_last_s)

    def transferred(self, transfer_s: float) -> None:
        self._histograms["kv_transfer_seconds"].observe(transfer_s)

    def finished(self, timeline: Timeline, num_prompt_tokens: int, reasons: Iterable[str]) -> None:
        """A request came to its end, by itself."""
        self._prompt_tokens.inc(num_prompt_tokens)
        self.ended(reasons)
        self._observe("time_to_first_token_seconds", timeline.ttft_s)
        self._observe("e2e_request_latency_seconds", timeline.e2e_s)
        self._observe("request_queue_time_seconds", timeline.queue_s)
        self._observe("request_prefill_time_seconds", timeline.prefill_s)
        if timeline.was_handed_over:
            self._observe("handoff_gap_seconds", timeline.handoff_gap_s)

    def ended(self, reasons: Iterable[str]) -> None:
        """Choices that ended for these reasons."""
        for reason in reasons:
            self._success.labels(**self._own, finished_reason=reason).inc()

    def render(self) -> bytes:
        """The text a scrape gets."""
        return generate_latest(self._registry)

    def _observe(self, name: str, seconds: float | None) -> None:
        if seconds is not None:
            self._histograms[name].observe(seconds)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(_PREFIX + name, text, LABELS, registry=self._registry).labels(**self._own)


class _ClusterCollector(Collector):
    """Series that are read off the cluster at each scrape."""

    def __init__(self, model_name: str, sample: Callable[[], ClusterSample]) -> None:
        self._model_name = model_name
        self._sample = sample

    def collect(self) -> Iterator[Metric]:
        cluster = self._sample()
        own = (COORDINATOR, COORDINATOR)
        workers = [(w.role, w.worker_id, w.stats) for w in cluster.workers]
        running = {own: float(cluster.num_requests_in_flight)}
        waiting = {own: float(cluster.num_requests_waiting)}
        running |= {(r, i): float(s.num_requests_running) for r, i, s in workers}
        waiting |= {(r, i): float(s.num_requests_waiting) for r, i, s in workers}
        yield self._gauge("num_requests_running", "Requests being computed.", running)
        yield self._gauge("num_requests_waiting", "Requests waiting for room.", waiting)
        usage = {(r, i): _usage(s) for r, i, s in workers}
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage)
        for name, field in _WORKER_COUNTERS.items():
            values = {(r, i): float(getattr(s, field)) for r, i, s in workers}
            yield self._counter(name, f"{field} of a worker, since its start.", values)
        for name, text in _OWN_COUNTERS.items():
            value = {own: float(getattr(cluster, name))}
            yield self._counter(name, text, value)
        for name in ("prefix_cache_queries", "prefix_cache_hits"):
            yield self._counter(name, "Prompt tokens; 0 without a prefix cache.", {own: 0.0})

    def _gauge(self, name: str, text: str, values: Mapping[tuple[str, str], float]) -> Metric:
        family = GaugeMetricFamily(_PREFIX + name, text, labels=LABELS)
        for labels, value in values.items():
            family.add_metric((self._model_name, *labels), value)
        return family

    def _counter(self, name: str, text: str, values: Mapping[tuple[str, str], float]) -> Metric:
        family = CounterMetricFamily(_PREFIX + name, text, labels=LABELS)
        for labels, value in values.items():
            family.add_metric((self._model_name, *labels), value)
        return family


# Bytes are counted where they arrive, so that a sum over workers counts each once.
_WORKER_COUNTERS = {
    "num_preemptions": "num_preemptions",
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
