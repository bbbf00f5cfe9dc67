"""Prometheus metrics of a cluster: vLLM's names behind `splitserve_`, and our own.

Every series carries model_name, role and worker_id; what the coordinator measures itself has role
"coordinator". What workers report is read when somebody scrapes (cluster_metrics.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from splitserve.cluster_metrics import COORDINATOR, LABELS, PREFIX, ClusterCollector, ClusterSample
from splitserve.timeline import Timeline

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6,
    1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_DURATIONS = {
    "time_to_first_token_seconds": "From a request's arrival until its first token was sent.",
    "inter_token_latency_seconds": "Between two deliveries of tokens to one choice.",
    "e2e_request_latency_seconds": "From a request's arrival to its end.",
    "request_queue_time_seconds": "Waiting in the coordinator and the worker, before prefill.",
    "request_prefill_time_seconds": "From a prompt's first forward pass to its first token.",
    "request_delivery_time_seconds": "From the end of prefill until the first token was sent.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_inference_time_seconds": "From a prompt's first forward pass to the last token.",
    "handoff_gap_seconds": "Between tokens 0 and 1 of a request that was handed over.",
    "handoff_grant_wait_seconds": "Within the gap: until the decode worker had room.",
    "handoff_transfer_seconds": "Within the gap: until all KV was at the decode worker.",
    "handoff_decode_wait_seconds": "Within the gap: until its first decode step began.",
    "handoff_first_step_seconds": "Within the gap: the first decode step.",
    "kv_transfer_seconds": "From Grant to Received of a KV transfer, much of it during prefill.",
}
_SIZES = {
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Tokens of a request's answers.",
}


class Metrics:
    """Owns one registry and what is measured request by request."""

    def __init__(self, model_name: str, sample: Callable[[], ClusterSample]) -> None:
        self._registry = CollectorRegistry()
        self._own = {"model_name": model_name, "role": COORDINATOR, "worker_id": COORDINATOR}
        self._histograms = {
            **{name: self._histogram(name, text, _SECONDS) for name, text in _DURATIONS.items()},
            **{name: self._histogram(name, text, _TOKENS) for name, text in _SIZES.items()},
        }
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, once a request.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens of answers.")
        self._success = Counter(
            f"{PREFIX}request_success",
            "Choices that ended, by finish_reason (abort: cancelled or failed).",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._registry.register(ClusterCollector(model_name, sample))

    def tokens_delivered(self, num_tokens: int, since_last_s: float | None) -> None:
        """Some tokens of one choice went out, so long after the ones before them."""
        self._generation_tokens.inc(num_tokens)
        self._observe("inter_token_latency_seconds", since_last_s)

    def transferred(self, kv_transfer_s: float) -> None:
        """KV went over, whatever becomes of its request."""
        self._observe("kv_transfer_seconds", kv_transfer_s)

    def ended(self, reasons: Iterable[str]) -> None:
        """Choices that ended for these reasons."""
        for reason in reasons:
            self._success.labels(**self._own, finished_reason=reason).inc()

    def counted(self, num_prompt_tokens: int, num_generated_tokens: int) -> None:
        """A request came to its end by itself: its tokens."""
        self._prompt_tokens.inc(num_prompt_tokens)
        self._observe("request_prompt_tokens", num_prompt_tokens)
        self._observe("request_generation_tokens", num_generated_tokens)

    def timed(self, timeline: Timeline) -> None:
        """A request came to its end by itself: its times, as far as they are known."""
        self._observe("time_to_first_token_seconds", timeline.ttft_s)
        self._observe("e2e_request_latency_seconds", timeline.e2e_s)
        self._observe("request_queue_time_seconds", timeline.queue_s)
        self._observe("request_prefill_time_seconds", timeline.prefill_s)
        self._observe("request_delivery_time_seconds", timeline.delivery_s)
        self._observe("request_decode_time_seconds", timeline.decode_s)
        self._observe("request_inference_time_seconds", timeline.inference_s)

    def handoff_timed(self, timeline: Timeline) -> None:
        """The same for its hand-off, once both of its workers have told of it."""
        self._observe("handoff_gap_seconds", timeline.handoff_gap_s)
        self._observe("handoff_grant_wait_seconds", timeline.grant_wait_s)
        self._observe("handoff_transfer_seconds", timeline.transfer_s)
        self._observe("handoff_decode_wait_seconds", timeline.decode_wait_s)
        self._observe("handoff_first_step_seconds", timeline.first_step_s)

    def render(self) -> bytes:
        """The text a scrape gets."""
        return generate_latest(self._registry)

    def _observe(self, name: str, value: float | None) -> None:
        if value is not None:
            self._histograms[name].observe(max(0.0, value))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(PREFIX + name, text, LABELS, buckets=buckets, registry=self._registry)
        return histogram.labels(**self._own)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, LABELS, registry=self._registry).labels(**self._own)
