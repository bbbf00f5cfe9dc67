"""Prompts that go to another decode worker, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from splitserve.wire import messages as m
from tests.fake_runner import LAYOUT
from tests.ring import RawPrefill, Ring, open_ring, prompt_of

PROMPT = prompt_of(1, 60)


@pytest.fixture
def ring() -> Iterator[Ring]:
    with open_ring() as ring:
        yield ring


def test_a_prompt_queued_at_one_decode_worker_goes_to_another(ring: Ring) -> None:
    ring.start_decode("full", num_blocks=16)
    ring.start_decode("decode")
    ring.start_prefill()
    with closing(RawPrefill(ring, to="full")) as raw:
        raw.open("first", PROMPT)
        raw.answer(m.Grant)
        ring.ask("a", PROMPT, to=("prefill", "full"))
        full = ring.workers["full"]
        ring.wait_for(lambda: full.stats().num_requests_waiting == 1, "it waits")
        ring.retarget("a", "decode")
        ring.expect_answer("a", PROMPT)
        ring.wait_for(lambda: full.stats().num_requests_waiting == 0, "it left the line")
        raw.say(m.Abort("first", 0, ring.coordinator.epoch))
        raw.answer(m.AbortAck)
    ring.wait_for(lambda: bool(ring.coordinator.of(m.HandedOver)), "HandedOver")
    assert ring.coordinator.of(m.Failed) == []
    assert [h.attempt for h in ring.coordinator.of(m.HandedOver)] == [1]


def test_a_prompt_goes_elsewhere_while_it_is_computed_and_sent(ring: Ring) -> None:
    ring.start_decode("first")
    ring.start_decode("decode")
    runner = ring.start_slow_prefill()
    ring.ask("a", PROMPT, to=("prefill", "first"))
    first = ring.workers["first"]
    ring.wait_for(lambda: first.stats().num_kv_bytes_received > 0, "some KV has arrived")
    ring.retarget("a", "decode")
    ring.wait_until_empty("first")
    assert not ring.coordinator.of(m.FirstToken)
    runner.at_full_speed.set()
    ring.expect_answer("a", PROMPT)
    sent = ring.workers["decode"].stats().num_kv_bytes_received
    assert sent == len(PROMPT) * LAYOUT.token_bytes


def test_a_committed_prompt_goes_elsewhere_and_keeps_its_first_token(ring: Ring) -> None:
    """The first decode worker is stuck in a step; it finds Commit and Abort when that is over."""
    stuck = ring.start_decode("first")
    ring.start_decode("decode")
    ring.start_prefill()
    stuck.step_s = 60.0
    stuck.at_full_speed.clear()
    ring.ask("busy", prompt_of(2, 8), to=("first", None))
    first = ring.workers["first"]
    ring.wait_for(lambda: bool(first.scheduler.sequences), "it computes")
    ring.ask("a", PROMPT, to=("prefill", "first"))
    ring.wait_for(lambda: bool(ring.coordinator.of(m.FirstToken)), "a's first token")
    ring.retarget("a", "decode")
    ring.expect_answer("a", PROMPT)
    stuck.at_full_speed.set()
    ring.wait_for_tokens("busy", 8)
    assert ring.coordinator.of(m.Failed) == []


def test_a_prompt_that_waits_for_blocks_is_retargeted_before_it_is_opened(ring: Ring) -> None:
    ring.start_decode("first")
    ring.start_decode("decode")
    runner = ring.start_prefill(num_blocks=15, max_num_batched_tokens=4)
    runner.at_full_speed.clear()
    ring.ask("before", prompt_of(3, 60), to=("prefill", "first"))
    ring.ask("a", PROMPT, to=("prefill", "first"))
    prefill = ring.workers["prefill"]
    ring.wait_for(lambda: prefill.stats().num_requests_waiting == 1, "it waits")
    ring.retarget("a", "decode")
    runner.at_full_speed.set()
    ring.expect_answer("a", PROMPT)
    ring.expect_answer("before", prompt_of(3, 60))


def test_a_draining_decode_worker_sends_prompts_elsewhere(ring: Ring) -> None:
    ring.start_decode("draining")
    ring.start_decode("decode")
    ring.start_prefill()
    ring.signal("draining")
    ring.wait_for(lambda: ring.draining("draining"), "it says so")
    ring.ask("a", PROMPT, to=("prefill", "draining"))
    failed = ring.first_failure()
    assert "draining" in failed.reason and failed.retriable and failed.kept
    ring.retarget("a", "decode")
    ring.expect_answer("a", PROMPT)
    assert ring.workers["prefill"].stats().num_tokens_prefilled == len(PROMPT)


@pytest.mark.parametrize("told_first", [True, False])
def test_a_dead_decode_worker_costs_no_prefill(ring: Ring, told_first: bool) -> None:
    """ai-dynamo/dynamo#13088, kvcache-ai/Mooncake#2246: routed to a worker that was gone."""
    ring.start_decode("dead")
    ring.start_decode("decode")
    runner = ring.start_slow_prefill()
    ring.ask("a", PROMPT, to=("prefill", "dead"))
    dead = ring.workers["dead"]
    ring.wait_for(lambda: dead.stats().num_kv_bytes_received > 0, "some KV has arrived")
    ring.vanish("dead")
    if told_first:
        ring.peer_gone("dead")
        ring.retarget("a", "decode")
    runner.at_full_speed.set()
    if not told_first:
        ring.wait_for(lambda: bool(ring.coordinator.of(m.FirstToken)), "the prompt is computed")
        ring.peer_gone("dead")
        ring.retarget("a", "decode")
    ring.expect_answer("a", PROMPT)
    assert ring.coordinator.of(m.Failed) == []
    assert ring.workers["prefill"].stats().num_tokens_prefilled == len(PROMPT)


def test_a_retarget_of_a_prompt_that_is_gone_fails_the_new_attempt(ring: Ring) -> None:
    ring.start_decode()
    ring.start_prefill()
    ring.retarget("nobody", "decode", attempt=3)
    failed = ring.first_failure()
    assert (failed.attempt, failed.stage, failed.retriable, failed.kept) == (
        3,
        "transfer",
        True,
        False,
    )
