from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.profiling.evidence import Evidence
from splitserve.profiling.ideas import FASTER_KERNELS
from splitserve.profiling.remedies import PoolFacts, Remedy, remedies
from tests.unit.profiling.evidences import busy, evidences

# Roofs of 10 GB/s and 200 GFLOP/s. The window of `busy` moves 270 MB and does 2 GFLOPs in a step of
# batch 8: 27 ms of bytes, of which the weights are 20, 10 ms of FLOPs; forward takes 45 ms of 50.
DECODE = PoolFacts(
    role="decode",
    num_prefill=1,
    num_decode=2,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    weight_bytes=200_000_000,
    weight_bytes_per_number=2,
    kv_token_bytes=20_000,
    kv_int8_token_bytes=10_625,  # heads of 64
    bytes_per_s=10e9,
    flops_per_s=200e9,
    transport="tcp",
    num_threads=2,
)
PREFILL = dataclasses.replace(DECODE, role="prefill", num_prefill=2)
# The same steps, but batches could be 4 times as large.
HALF_EMPTY: dict[str, Any] = {
    "num_slots_allowed": 640,
    "cap_s": 0.0,
    "no_request_s": 0.9,
    "full_batch_gain": 3.0,
}


def remedy(evidence: Evidence, facts: PoolFacts, start: str) -> Remedy:
    """The only one whose title starts so."""
    (found,) = [r for r in remedies(evidence, facts) if r.title.startswith(start)]
    return found


def titles(evidence: Evidence, facts: PoolFacts = DECODE) -> list[str]:
    return [r.title for r in remedies(evidence, facts)]


def test_more_requests_read_the_weights_and_do_the_host_work_once() -> None:
    found = remedy(busy(**HALF_EMPTY), DECODE, "more requests at once")
    # 4 x the batch: bytes 20 + 4 x 7 = 48 ms, FLOPs 4 x 10 = 40 ms; forward 45 x 48 / 27 = 80 ms
    assert found.speedup == pytest.approx(4 * 50 / (80 + 5))
    assert found.arithmetic == (
        "up to 32 sequences a step in place of 8.0; forward takes 1.78 times as long, the rest of a"
        " step as long as now: 4.00 x 50.0 ms / 85.0 ms a step = 2.35 times this worker's tokens/s"
    )
    assert found.applies_to == "decode"


def test_larger_batches_meet_the_other_roof() -> None:
    evidence = busy(**HALF_EMPTY, num_flops=100_000_000_000)
    found = remedy(evidence, DECODE, "more requests at once")
    # FLOPs 25 ms, so 100 ms where the bytes take 48
    assert found.speedup == pytest.approx(4 * 50 / (45 * 100 / 27 + 5))


def test_one_decode_worker_less_gives_its_requests_to_the_others() -> None:
    found = remedy(busy(**HALF_EMPTY), DECODE, "fewer decode workers: 2 to 1")
    # twice the batch: 20 + 2 x 7 = 34 ms; forward 45 x 34 / 27 = 56.7 ms
    gain = 2 * 50 / (45 * 34 / 27 + 5)
    assert found.speedup == pytest.approx(gain)
    assert f"{gain / 2:.2f} times what the pool does now" in found.arithmetic


def test_the_last_worker_is_not_taken_away() -> None:
    alone = dataclasses.replace(DECODE, num_decode=1)
    assert len(titles(busy(**HALF_EMPTY), alone)) == 1


ROOFS = {1: (24.0e9, 216e9), 2: (38.6e9, 418e9)}  # by threads


@pytest.mark.parametrize(
    ("num_threads", "one_ms", "size", "ms"),
    [
        (1, 29, 4, 32),
        (1, 29, 16, 60),
        (1, 29, 32, 102),
        (2, 22, 4, 23),
        (2, 22, 16, 38),
        (2, 22, 32, 60),
    ],
)
def test_the_prediction_agrees_with_the_steps_in_docs_performance(
    num_threads: int, one_ms: float, size: int, ms: float
) -> None:
    """SmolLM2-135M in bfloat16, 280 tokens of context, on two cores with these roofs."""
    bytes_per_s, flops_per_s = ROOFS[num_threads]
    facts = dataclasses.replace(
        DECODE, weight_bytes=269_030_016, bytes_per_s=bytes_per_s, flops_per_s=flops_per_s
    )
    evidence = Evidence(
        bottleneck="batching",
        window_s=one_ms / 1e3,
        num_steps=1,
        forward_s=one_ms / 1e3,
        no_request_s=one_ms / 1e3,
        num_slots_used=1,
        num_slots_allowed=size,
        num_bytes=275_505_408,
        num_flops=288_313_344,
    )
    found = remedy(evidence, facts, "more requests at once")
    measured = size * one_ms / ms
    assert measured / 1.25 < found.speedup < measured * 1.25


def test_without_free_blocks_memory_is_the_way_to_larger_batches() -> None:
    evidence = busy(**{**HALF_EMPTY, "no_request_s": 0.0, "no_blocks_s": 0.9})
    found = remedies(evidence, DECODE)
    assert found[0].title.startswith("more KV memory")
    assert "600 blocks in place of 150" in found[0].arithmetic
    twice = 2 * 50 / (45 * 34 / 27 + 5)
    times = 20_000 / 10_625
    int8 = times * 50 / (45 * (20 + 7 * times) / 27 + 5)
    assert [r.speedup for r in found[1:]] == [pytest.approx(twice), pytest.approx(int8)]
    assert found[2].title == "quantised KV: --kv-cache-dtype int8"


def test_host_work_hides_behind_the_forward_pass() -> None:
    evidence = busy(forward_s=0.5, cap_s=0.5, schedule_s=0.44)
    overlap = remedy(evidence, DECODE, "overlap")
    assert overlap.speedup == pytest.approx(1 / (1 - 0.5))
    fewer = remedy(evidence, DECODE, "fewer Python steps: schedule")
    assert fewer.speedup == pytest.approx(1 / (1 - 0.22))
    wider = remedy(evidence, DECODE, "wider batches: max_num_seqs 8 to 16")
    assert wider.speedup == pytest.approx(2 * 50 / (25 * 34 / 27 + 25))


def test_no_more_host_work_hides_than_there_is_forward_pass() -> None:
    evidence = busy(forward_s=0.2, cap_s=0.2, schedule_s=0.74)
    assert remedy(evidence, DECODE, "overlap").speedup == pytest.approx(1 / (1 - 0.2))


def test_faster_transfers_shorten_gaps_only() -> None:
    evidence = busy(window_s=2.0, kv_wait_s=1.0)
    assert remedy(evidence, DECODE, "another transport").speedup == pytest.approx(1 / (1 - 0.375))
    assert remedy(evidence, DECODE, "layer-wise push").speedup == pytest.approx(1 / (1 - 0.25))
    title = "smaller KV: --kv-cache-dtype int8, 10625 bytes a token in place of 20000"
    smaller = remedy(evidence, DECODE, title)
    assert smaller.speedup == pytest.approx(1 / (1 - 0.5 * (1 - 10_625 / 20_000)))
    assert smaller.applies_to == "both"


def test_faster_transfers_fill_batches_for_the_time_that_they_save() -> None:
    evidence = busy(**{**HALF_EMPTY, "no_request_s": 0.0, "waiting_for_kv_s": 0.9})
    twice = 2 * 50 / (45 * 34 / 27 + 5)
    found = remedy(evidence, DECODE, "layer-wise push")
    assert found.speedup == pytest.approx(1 + 0.9 / 2 * (twice - 1))


def test_memory_remedies_take_bytes_away() -> None:
    evidence = busy()
    # KV is 7 of 27 ms, weights 20; forward is 0.9 of the window
    kv = remedy(evidence, DECODE, "quantised KV: --kv-cache-dtype int8")
    assert kv.speedup == pytest.approx(1 / (1 - 0.9 * (1 - (20 + 7 * 10_625 / 20_000) / 27)))
    weights = remedy(evidence, DECODE, "quantised weights: --quantization int8")
    assert weights.speedup == pytest.approx(1 / (1 - 0.9 * (1 - 17 / 27)))
    prefix = remedy(evidence, DECODE, "prefix reuse")  # 7 of the 8 read half of theirs for nothing
    assert prefix.speedup == pytest.approx(1 / (1 - 0.9 * (1 - (27 - 7 * 7 / 16) / 27)))
    wider = remedy(evidence, DECODE, "wider batches: max_num_seqs 8 to 16")
    assert wider.speedup == pytest.approx(2 * 50 / (45 * 34 / 27 + 5))


def test_prefill_computes_a_shared_prefix_once() -> None:
    evidence = busy(num_flops=100_000_000_000)
    found = remedy(evidence, PREFILL, "prefix reuse: compute")  # 20 + 7 / 2 ms of bytes, 25 / 2
    assert found.speedup == pytest.approx(1 / (1 - 0.9 * (1 - 23.5 / 27)))
    wider = remedy(evidence, PREFILL, "wider batches: max_num_batched_tokens 512 to 1024")
    assert wider.speedup == pytest.approx(2 * 50 / (45 * 50 / 27 + 5))


def test_a_quantised_model_still_has_its_flops_to_do() -> None:
    evidence = busy(num_flops=100_000_000_000)
    weights = remedy(evidence, DECODE, "quantised weights")
    assert weights.speedup == pytest.approx(1 / (1 - 0.9 * (1 - 25 / 27)))


COMPUTE: dict[str, Any] = {"compute_floor_s": 0.8, "floor_s": 0.8, "num_flops": 160_000_000_000}


def test_compute_is_shared_by_more_workers() -> None:
    one = dataclasses.replace(PREFILL, num_prefill=1)
    evidence = busy(**COMPUTE)
    assert remedy(evidence, one, "more prefill workers: 1 to 2").speedup == pytest.approx(2.0)
    assert remedy(evidence, PREFILL, "more prefill workers: 2 to 3").speedup == pytest.approx(1.5)
    waits = busy(**COMPUTE, window_s=1.25, wait_s=0.25)
    found = remedy(waits, one, "more prefill workers: 1 to 2")
    assert found.speedup == pytest.approx(1 / (1 - 0.8 / 2))


def test_prompts_that_a_decode_worker_computes_can_go_elsewhere() -> None:
    evidence = busy(**COMPUTE, num_prefill_tokens=480)
    found = remedy(evidence, DECODE, "prompts to prefill workers")
    assert found.speedup == pytest.approx(1 / (1 - 0.9 * 0.75))


def test_slow_kernels_come_first_when_they_are_far_from_their_roof() -> None:
    evidence = busy(floor_s=0.09, memory_floor_s=0.09, compute_floor_s=0.01)
    first = remedies(evidence, DECODE)[0]
    assert first.title == FASTER_KERNELS
    assert first.speedup == pytest.approx(1 / (1 - 0.9 * (1 - 0.1 / 0.4)))
    assert "10.0 times its floor (memory)" in first.arithmetic


def test_slow_kernels_come_last_when_they_are_near() -> None:
    evidence = busy(floor_s=0.9 * 0.25, memory_floor_s=0.01, compute_floor_s=0.9 * 0.25)
    found = remedies(evidence, DECODE)
    assert [r.title for r in found] == ["more threads: 2 to 4", FASTER_KERNELS]
    assert found[0].speedup == pytest.approx(1 / (1 - 0.9 / 3))
    assert found[1].speedup > found[0].speedup


def test_threads_are_no_remedy_on_a_gpu() -> None:
    evidence = busy(floor_s=0.09, memory_floor_s=0.09, compute_floor_s=0.01)
    assert titles(evidence, dataclasses.replace(DECODE, device="cuda:0")) == [FASTER_KERNELS]


@pytest.mark.parametrize(
    ("num", "wait_s", "title"),
    [
        (4, 0.6, "fewer decode workers: 4 to 2"),
        (4, 0.9, "fewer decode workers: 4 to 1"),
        (2, 1.0, "fewer decode workers: 2 to 1"),
        (1, 1.0, "more load: the decode pool is not what binds"),
    ],
)
def test_an_idle_pool_says_what_could_be_taken_away(num: int, wait_s: float, title: str) -> None:
    evidence = Evidence(window_s=1.0, wait_s=wait_s, bottleneck="idle")
    found = remedies(evidence, dataclasses.replace(DECODE, num_decode=num))
    assert found[0].title == title
    assert all(r.speedup == 1.0 for r in found)


POOLS = st.builds(
    PoolFacts,
    role=st.sampled_from(["prefill", "decode"]),
    num_prefill=st.integers(0, 100),
    num_decode=st.integers(0, 100),
    max_num_seqs=st.integers(1, 1024),
    max_num_batched_tokens=st.integers(1, 1 << 16),
    weight_bytes=st.integers(0, 10**12),
    weight_bytes_per_number=st.sampled_from([0, 1, 2, 4]),
    kv_token_bytes=st.integers(0, 10**7),
    kv_int8_token_bytes=st.integers(0, 10**7),
    bytes_per_s=st.floats(1e6, 1e13),
    flops_per_s=st.floats(1e6, 1e16),
    transport=st.sampled_from(["auto", "tcp", "shm", "nixl"]),
    num_threads=st.integers(0, 256),
    device=st.sampled_from(["cpu", "cuda:0"]),
    num_spare_cores=st.none() | st.integers(0, 256),
)


@given(evidences(), POOLS)
def test_remedies_are_ranked_finite_and_no_loss(evidence: Evidence, facts: PoolFacts) -> None:
    found = remedies(evidence, facts)
    assert found
    for r in found:
        assert math.isfinite(r.speedup)
        assert r.speedup >= 1
        assert "times this worker's" in r.arithmetic or "pool's" in r.arithmetic or r.speedup == 1
        assert r.applies_to in (facts.role, "both")
    ranked = [r.speedup for r in found if r.title != FASTER_KERNELS]
    assert ranked == sorted(ranked, reverse=True)
    if evidence.efficiency < 0.25:
        assert found[0].speedup == max(r.speedup for r in found)
