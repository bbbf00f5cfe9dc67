"""Waiting for a busy decode worker, over real sockets: it costs time and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from splitserve.wire import messages as m
from tests.ring import RawPrefill, Ring, open_ring, prompt_of

SHORT_STALL_S = 0.2
STEP_S = 0.02


@pytest.fixture
def ring() -> Iterator[Ring]:
    with open_ring() as ring:
        yield ring


def test_a_prompt_waits_in_decodes_line_longer_than_any_lease(ring: Ring) -> None:
    """aws-samples/aws-do-eks PR#84, vllm-project/vllm PR#21753, PR#32208, PR#35764: the prefill
    side's timer was shorter than the wait on the decode side; freed blocks were read then."""
    decode = ring.start_decode(max_num_seqs=1)
    ring.start_prefill()
    decode.at_full_speed.clear()
    decode.step_s = STEP_S
    long = prompt_of(5, 20)
    ring.ask("long", long, max_tokens=60)  # 1.2 s, six times the stall timeout
    ring.wait_for_tokens("long", 2)
    prompts = {f"r{n}": prompt_of(n, 30) for n in range(3)}
    for request_id, prompt in prompts.items():
        ring.ask(request_id, prompt, max_tokens=4, clocks=(60.0, SHORT_STALL_S))
    ring.wait_for(lambda: ring.workers["decode"].stats().num_requests_waiting == 3, "three wait")
    held = ring.num_free("prefill")
    ring.wait_for_tokens("long", 59)
    assert ring.num_free("prefill") == held < 64, "what waits is kept, not leased"
    for request_id, prompt in prompts.items():
        ring.expect_answer(request_id, prompt, 4)
    ring.expect_answer("long", long, 60)
    assert ring.coordinator.of(m.Failed) == []


def test_a_burst_wider_than_decodes_window_fails_nobody(ring: Ring) -> None:
    """lightseekorg/tokenspeed PR#1427: prompts that were only queued ran into a timer, and each
    held its place for the whole of it: 14 of 64 failed, and 35 s became 1392 s."""
    decode = ring.start_decode(max_num_seqs=2, num_blocks=200)
    ring.start_prefill(num_blocks=400)
    decode.at_full_speed.clear()
    decode.step_s = STEP_S
    num_requests, num_tokens = 32, 8
    prompts = {f"r{n}": prompt_of(n, 30) for n in range(num_requests)}
    started = time.monotonic()
    for request_id, prompt in prompts.items():
        ring.ask(request_id, prompt, max_tokens=num_tokens, clocks=(60.0, SHORT_STALL_S))
    for request_id, prompt in prompts.items():
        ring.expect_answer(request_id, prompt, num_tokens)
    ideal_s = num_requests / 2 * num_tokens * STEP_S
    assert SHORT_STALL_S < ideal_s
    assert time.monotonic() - started < 3 * ideal_s
    assert ring.coordinator.of(m.Failed) == []


def test_kv_on_its_way_counts_as_much_as_answers_being_written(ring: Ring) -> None:
    """sgl-project/sglang #30033: limits did not see what was transferred in and not yet running,
    so the decode side's pool filled up."""
    ring.start_decode(max_num_seqs=3)
    ring.start_prefill()
    decode = ring.workers["decode"]
    with closing(RawPrefill(ring)) as raw:
        for name in "ab":
            raw.open(name, prompt_of(1, 20))
            raw.answer(m.Grant)
        for name in "cd":
            raw.open(name, prompt_of(2, 20))
        assert raw.answer(m.Grant).request_id == "c"
        assert raw.answer(m.Queued).request_id == "d"
        stats = decode.stats()
        assert (stats.num_transfers_in_flight, stats.num_requests_waiting) == (3, 1)
        for name in "abcd":
            raw.say(m.Abort(name, 0, ring.coordinator.epoch))
            raw.answer(m.AbortAck)


def test_reserved_blocks_are_nobody_elses_room_to_grow(ring: Ring) -> None:
    """sgl-project/sglang #30033, of blocks: an answer grows into what is left, or is preempted."""
    ring.start_decode(num_blocks=24)
    prompt = prompt_of(3, 20)
    with closing(RawPrefill(ring)) as raw:
        raw.open("a", prompt_of(1, 60))
        raw.answer(m.Grant)
        ring.ask("b", prompt, max_tokens=11, to=("decode", None))
        ring.expect_answer("b", prompt, 11)
        assert ring.workers["decode"].stats().num_blocks_reserved == 16
        raw.open("c", prompt_of(2, 60))
        raw.answer(m.Queued)
        for name in "ac":
            raw.say(m.Abort(name, 0, ring.coordinator.epoch))
            raw.answer(m.AbortAck)
