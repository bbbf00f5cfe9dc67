"""Where a request's time went, as the cluster tells it, against what its client measured.

inference-sim#1510, vllm-project/vllm#22454, #29474, #8115, #10853, vllm-project/vllm-ascend#6485:
with prefill and decode apart, the way between them and the wait behind it were counted nowhere,
time to first token was counted another number of times than there were requests, and prompt tokens
on both sides.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence

import pytest
from prometheus_client.parser import text_string_to_metric_families

from splitserve.wire import messages as m
from tests.cluster.clients import Abortable, plain, prompt
from tests.cluster.faulty import FaultyRing, tiny_faulty
from tests.cluster.harness import show
from tests.cluster.shim import Parts, Shim
from tests.cluster.timed import FIRST_TOKEN, HANDOFF, Timed, ask_timed
from tests.waiting import wait_until

pytestmark = [pytest.mark.breaking, pytest.mark.usefixtures("calm")]

SLOW_S = 1.0
NUM_REQUESTS = 500
NUM_PROMPT_TOKENS = 24
# A step takes as long as one of a real model, so that what the clients themselves need is small
# beside it: they share the cores.
STEP_S = 0.05


@pytest.fixture(scope="module")
def shared_ring(shim: Shim) -> Iterator[FaultyRing]:
    with tiny_faulty(around=shim.between, prefill=1, decode=1) as ring:
        yield ring


def slow_commits(message: m.Message, parts: Parts) -> Sequence[tuple[float, Parts]]:
    """All KV is there, but that is heard late."""
    return [(SLOW_S if isinstance(message, m.Commit) else 0.0, parts)]


def test_a_slow_way_and_a_long_wait_are_told_where_they_were(ring: FaultyRing, shim: Shim) -> None:
    """B117: the first token is not late, and every part of the gap behind it has a name."""
    ring.pace.write(decode_step_s=SLOW_S)
    other = Abortable(ring.base_url, plain(0, max_tokens=400))
    wait_until(lambda: ring.total("decode", "num_requests_running") == 1, 10, "a running answer")
    shim.rule = slow_commits
    (one,) = ask_timed(ring.base_url, [plain(1, max_tokens=2)])
    other.abort()
    timing = one.timing
    assert one.ttft_s < SLOW_S, "the first token waits for nobody"
    assert timing["ttft_s"] == pytest.approx(one.ttft_s, abs=0.05)
    assert one.sum_of(FIRST_TOKEN) == pytest.approx(one.ttft_s, abs=0.05)
    assert timing["handoff_gap_s"] > 2 * SLOW_S
    assert timing["handoff_gap_s"] == pytest.approx(one.gap_s, abs=0.05)
    assert one.sum_of(HANDOFF) == pytest.approx(one.gap_s, abs=0.05)
    assert timing["grant_wait_s"] < SLOW_S and timing["first_step_s"] > SLOW_S
    assert SLOW_S < timing["transfer_s"] < 2 * SLOW_S
    assert timing["decode_wait_s"] < SLOW_S + 0.05, "at most the step that ran"


def test_all_parts_add_up_over_many_requests(ring: FaultyRing, pytestconfig: pytest.Config) -> None:
    """What no part accounts for is less than 2 % of what clients measured."""
    ring.pace.write(prefill_step_s=STEP_S, decode_step_s=STEP_S)
    before = samples(ring)
    bodies = [
        plain(n, prompt=prompt(n, NUM_PROMPT_TOKENS), max_tokens=3) for n in range(NUM_REQUESTS)
    ]
    seen = ask_timed(ring.base_url, bodies, concurrency=8)
    show(pytestconfig, f"Time of {NUM_REQUESTS} requests", [line(*one) for one in accounts(seen)])
    for _, explained_s, measured_s in accounts(seen):
        assert explained_s == pytest.approx(measured_s, rel=0.02)
    check_counts(ring, before)


def accounts(seen: Sequence[Timed]) -> list[tuple[str, float, float]]:
    """What is measured, what its parts add up to, and what it was."""
    return [
        (
            "time to first token",
            sum(one.sum_of(FIRST_TOKEN) for one in seen),
            sum(one.ttft_s for one in seen),
        ),
        (
            "hand-off gap",
            sum(one.sum_of(HANDOFF) for one in seen),
            sum(one.timing["handoff_gap_s"] for one in seen),
        ),
    ]


def line(name: str, explained_s: float, measured_s: float) -> str:
    left = 100 * (measured_s - explained_s) / measured_s
    return f"  {name:20} {measured_s:8.3f} s, parts {explained_s:8.3f} s, left {left:5.2f} %"


def check_counts(ring: FaultyRing, before: dict[str, float]) -> None:
    """Counts equal requests, and the parts' histograms add up as the requests' do."""

    def grown(name: str) -> float:
        return samples(ring)[name] - before.get(name, 0.0)

    stages = ("grant_wait", "transfer", "decode_wait", "first_step")
    handoff = [f"handoff_{stage}_seconds" for stage in stages]
    first_token = [f"request_{stage}_time_seconds" for stage in ("queue", "prefill", "delivery")]
    others = ["handoff_gap_seconds", "kv_transfer_seconds", "request_prompt_tokens"]
    wholes = ["time_to_first_token_seconds", "e2e_request_latency_seconds"]
    for name in (*handoff, *first_token, *others, *wholes):
        wait_until(lambda: grown(f"{name}_count") >= NUM_REQUESTS, 5, name)  # noqa: B023
        assert grown(f"{name}_count") == NUM_REQUESTS, name
    assert grown("prompt_tokens_total") == NUM_REQUESTS * NUM_PROMPT_TOKENS, "once, cluster-wide"
    parts_s = sum(grown(f"{name}_sum") for name in first_token)
    assert parts_s == pytest.approx(grown("time_to_first_token_seconds_sum"))
    parts_s = sum(grown(f"{name}_sum") for name in handoff)
    assert parts_s == pytest.approx(grown("handoff_gap_seconds_sum"), rel=0.02)


def test_nothing_is_negative_after_aborts(ring: FaultyRing) -> None:
    chance = random.Random(7)
    before = samples(ring)
    ring.pace.write(prefill_step_s=0.01, decode_step_s=0.01, frame_s=0.005)
    for number in range(40):
        request = Abortable(ring.base_url, plain(number, prompt=prompt(number, 100)))
        time.sleep(chance.random() * 0.1)  # anywhere in its way
        request.abort()
    (one,) = ask_timed(ring.base_url, [plain(99, max_tokens=8)])
    times = [one.timing[name] for name in (*FIRST_TOKEN, *HANDOFF, "e2e_s", "kv_transfer_s")]
    assert min(*times, *(at for at in one.timing["moments"].values() if at is not None)) >= 0.0
    ring.assert_drained()
    after = samples(ring)
    assert min(after.values()) >= 0.0
    assert all(after[name] >= value for name, value in before.items() if is_counter(name))
    num_timed = after["time_to_first_token_seconds_count"] - before.get(
        "time_to_first_token_seconds_count", 0.0
    )
    assert num_timed == after["e2e_request_latency_seconds_count"] - before.get(
        "e2e_request_latency_seconds_count", 0.0
    )


def samples(ring: FaultyRing) -> dict[str, float]:
    """Every series of /metrics, summed over its labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(ring.http.get("/metrics").text):
        for sample in family.samples:
            name = sample.name.removeprefix("splitserve_")
            found[name] = found.get(name, 0.0) + sample.value
    return found


def is_counter(name: str) -> bool:
    return name.endswith(("_total", "_count", "_sum"))
