"""Each request is counted once, and what binds a worker is a labelled gauge."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from splitserve.cluster_metrics import LABELS, ClusterSample, WorkerSample
from splitserve.metrics import Metrics
from splitserve.profiling.evidence import BOTTLENECKS, PHASES, Evidence
from splitserve.timeline import Timeline
from splitserve.wire.messages import Begun, HandoffTimes, WorkerStats

EVIDENCE = Evidence(
    window=3,
    window_s=2.0,
    forward_s=1.0,
    wait_s=0.5,
    num_slots_used=12,
    num_slots_allowed=48,
    memory_floor_s=0.6,
    compute_floor_s=0.1,
    bottleneck="memory",
)


def metrics(*workers: WorkerSample) -> Metrics:
    return Metrics("model", lambda: ClusterSample(workers, 0, 0, 0, 0, 0))


def values(shown: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """Of one series, by role, worker_id and what further labels it has."""
    samples = [
        sample
        for family in text_string_to_metric_families(shown.render().decode())
        for sample in family.samples
        if sample.name == f"splitserve_{name}"
    ]
    return {
        (
            labels["role"],
            labels["worker_id"],
            *(labels[x] for x in labels if x not in LABELS),
        ): value
        for labels, value in ((sample.labels, sample.value) for sample in samples)
    }


def own(shown: Metrics, name: str) -> float:
    """Of one series that only the coordinator has."""
    (value,) = values(shown, name).values()
    return value


def test_a_finished_request_is_in_every_histogram_once() -> None:
    shown = metrics()
    timeline = Timeline(arrived_at=0.0)
    timeline.dispatched("p", "d", 0, now=1.0)
    timeline.prompt_computed(0, 1.0, 2.0)
    timeline.tokens_delivered(0, now=5.0)
    timeline.handed_over(0, 1000, HandoffTimes(0.5, 1.0, 2.0, 0.0, 1.0))
    timeline.decode_began(0, Begun("r", 0, 0.25, 0.25))
    timeline.tokens_delivered(1, now=7.0)
    timeline.tokens_delivered(2, now=9.0)
    timeline.finished(9.0)
    shown.counted(30, 3)
    shown.transferred(2.0)
    shown.timed(timeline)
    shown.handoff_timed(timeline)
    sums = {
        "time_to_first_token_seconds": 5.0,
        "e2e_request_latency_seconds": 9.0,
        "request_queue_time_seconds": 2.0,
        "request_prefill_time_seconds": 2.0,
        "request_delivery_time_seconds": 1.0,
        "request_decode_time_seconds": 4.0,
        "request_inference_time_seconds": 7.0,
        "handoff_gap_seconds": 2.0,
        "handoff_grant_wait_seconds": 0.5,
        "handoff_transfer_seconds": 1.0,
        "handoff_decode_wait_seconds": 0.25,
        "handoff_first_step_seconds": 0.25,
        "kv_transfer_seconds": 2.0,
        "request_prompt_tokens": 30.0,
        "request_generation_tokens": 3.0,
    }
    for name, total in sums.items():
        assert own(shown, f"{name}_count") == 1, name
        assert own(shown, f"{name}_sum") == total, name
    assert own(shown, "prompt_tokens_total") == 30


def test_what_is_not_known_is_not_counted() -> None:
    shown = metrics()
    timeline = Timeline(arrived_at=0.0)
    timeline.dispatched("d", "d", 0, now=1.0)
    timeline.tokens_delivered(0, now=5.0)
    timeline.finished(5.0)
    shown.timed(timeline)
    shown.handoff_timed(timeline)
    assert own(shown, "time_to_first_token_seconds_count") == 1
    assert own(shown, "request_prefill_time_seconds_count") == 0
    assert own(shown, "handoff_gap_seconds_count") == 0


def test_one_class_of_a_worker_is_one() -> None:
    shown = metrics(
        WorkerSample("d0", "decode", WorkerStats(evidence=EVIDENCE)),
        WorkerSample("p0", "prefill", WorkerStats()),  # no window is over yet
    )
    classes = values(shown, "worker_bottleneck")
    assert classes == {("decode", "d0", name): float(name == "memory") for name in BOTTLENECKS}
    shares = values(shown, "worker_time_share")
    assert {phase for _, _, phase in shares} == set(PHASES)
    assert shares["decode", "d0", "forward"] == 0.5
    assert shares["decode", "d0", "wait"] == 0.25
    assert values(shown, "worker_roof_share") == {
        ("decode", "d0", "memory"): 0.6,
        ("decode", "d0", "compute"): 0.1,
    }
    assert values(shown, "worker_batch_occupancy") == {("decode", "d0"): 0.25}


def test_an_idle_worker_has_shares_too() -> None:
    shown = metrics(WorkerSample("d0", "decode", WorkerStats(evidence=Evidence())))
    assert set(values(shown, "worker_roof_share").values()) == {0.0}
    assert values(shown, "worker_bottleneck")["decode", "d0", "idle"] == 1.0
