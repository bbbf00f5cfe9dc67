"""Hand-offs that don't go as planned, over real sockets: nothing leaks, and the answer is right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from kv_transfer.receiver import StoreReceiver
from splitserve.wire import messages as m
from tests.fake_runner import LAYOUT, FakeRunner, answer
from tests.fake_store import whole
from tests.ring import RawPrefill, Ring, open_ring, prompt_of

PROMPT = prompt_of(1, 60)


@pytest.fixture
def ring() -> Iterator[Ring]:
    with open_ring() as ring:
        yield ring


def free_blocks(ring: Ring, name: str) -> int:
    return int(ring.workers[name].stats().num_blocks_free)


def wait_until_empty(ring: Ring, name: str, num_blocks: int = 64) -> None:
    ring.wait_for(lambda: free_blocks(ring, name) == num_blocks, f"{name} holds nothing")


def wait_for_failure(ring: Ring) -> m.Failed:
    ring.wait_for(lambda: bool(ring.coordinator.of(m.Failed)), "Failed")
    failed = ring.coordinator.of(m.Failed)[0]
    assert isinstance(failed, m.Failed)
    return failed


def start_slow_prefill(ring: Ring, name: str = "prefill") -> FakeRunner:
    """A prompt of 60 tokens takes it 15 steps of 20 ms, until it is told to hurry."""
    runner = ring.start_prefill(name, max_num_batched_tokens=4)
    runner.at_full_speed.clear()
    return runner


def expect_answer(ring: Ring, prompt: tuple[int, ...] = PROMPT, request_id: str = "a") -> None:
    ring.wait_for_tokens(request_id, 8)
    assert ring.tokens(request_id) == answer(prompt, 1, 8)


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
        expect_answer(ring)
        ring.wait_for(lambda: full.stats().num_requests_waiting == 0, "it left the line")
        raw.say(m.Abort("first", 0, ring.coordinator.epoch))
        raw.answer(m.AbortAck)
    ring.wait_for(lambda: bool(ring.coordinator.of(m.HandedOver)), "HandedOver")
    assert ring.coordinator.of(m.Failed) == []
    assert [h.attempt for h in ring.coordinator.of(m.HandedOver)] == [1]


def test_a_prompt_goes_elsewhere_while_it_is_computed_and_sent(ring: Ring) -> None:
    ring.start_decode("first")
    ring.start_decode("decode")
    runner = start_slow_prefill(ring)
    ring.ask("a", PROMPT, to=("prefill", "first"))
    first = ring.workers["first"]
    ring.wait_for(lambda: first.stats().num_kv_bytes_received > 0, "some KV has arrived")
    ring.retarget("a", "decode")
    wait_until_empty(ring, "first")
    assert not ring.coordinator.of(m.FirstToken)
    runner.at_full_speed.set()
    expect_answer(ring)
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
    expect_answer(ring)
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
    expect_answer(ring)
    expect_answer(ring, prompt_of(3, 60), "before")


def test_a_draining_decode_worker_sends_prompts_elsewhere(ring: Ring) -> None:
    ring.start_decode("draining")
    ring.start_decode("decode")
    ring.start_prefill()
    ring.signal("draining")
    ring.wait_for(lambda: ring.draining("draining"), "it says so")
    ring.ask("a", PROMPT, to=("prefill", "draining"))
    failed = wait_for_failure(ring)
    assert "draining" in failed.reason and failed.retriable and failed.kept
    ring.retarget("a", "decode")
    expect_answer(ring)
    assert ring.workers["prefill"].stats().num_tokens_prefilled == len(PROMPT)


@pytest.mark.parametrize("told_first", [True, False])
def test_a_dead_decode_worker_costs_no_prefill(ring: Ring, told_first: bool) -> None:
    """ai-dynamo/dynamo#13088, kvcache-ai/Mooncake#2246: routed to a worker that was gone."""
    ring.start_decode("dead")
    ring.start_decode("decode")
    runner = start_slow_prefill(ring)
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
    expect_answer(ring)
    assert ring.coordinator.of(m.Failed) == []
    assert ring.workers["prefill"].stats().num_tokens_prefilled == len(PROMPT)


def test_a_retarget_of_a_prompt_that_is_gone_fails_the_new_attempt(ring: Ring) -> None:
    ring.start_decode()
    ring.start_prefill()
    ring.retarget("nobody", "decode", attempt=3)
    failed = wait_for_failure(ring)
    assert (failed.attempt, failed.stage, failed.retriable, failed.kept) == (
        3,
        "transfer",
        True,
        False,
    )


def test_an_open_that_comes_after_its_release_is_not_taken(ring: Ring) -> None:
    """vllm-project/vllm#46283: an abort that came first left the blocks to be taken later."""
    ring.start_decode()
    ring.coordinator.release("decode", "a", attempt=1)
    with closing(RawPrefill(ring)) as raw:
        decode = ring.workers["decode"]
        ring.wait_for(lambda: bool(decode.reception.tombstones), "the release is there")
        for attempt in (0, 1):
            raw.open("a", PROMPT, attempt)
            assert raw.answer(m.AbortAck).attempt == attempt
            assert free_blocks(ring, "decode") == 64
        raw.open("a", PROMPT, attempt=2)
        assert raw.answer(m.Grant).attempt == 2
        raw.open("a", PROMPT, attempt=1)
        assert raw.answer(m.AbortAck).attempt == 1
        raw.say(m.Abort("a", 2, ring.coordinator.epoch))
        raw.answer(m.AbortAck)


def test_a_newer_attempt_ends_the_older_ones(ring: Ring) -> None:
    ring.start_decode()
    runner = start_slow_prefill(ring, "p0")
    ring.start_prefill("p1")
    ring.ask("a", PROMPT, to=("p0", "decode"))
    decode = ring.workers["decode"]
    ring.wait_for(lambda: decode.stats().num_kv_bytes_received > 0, "some KV has arrived")
    ring.ask(("a", 1), PROMPT, to=("p1", "decode"))
    expect_answer(ring)
    wait_until_empty(ring, "decode")
    runner.at_full_speed.set()
    failed = wait_for_failure(ring)  # p0 hears from the decode worker that it is out of date
    assert (failed.attempt, failed.kept) == (0, True)
    ring.coordinator.release("p0", "a")


def test_a_newer_prefill_ends_the_older_one_where_it_is(ring: Ring) -> None:
    ring.start_decode()
    runner = start_slow_prefill(ring)
    ring.ask("a", PROMPT)
    decode = ring.workers["decode"]
    ring.wait_for(lambda: decode.stats().num_kv_bytes_received > 0, "some KV has arrived")
    ring.ask(("a", 2), PROMPT)
    runner.at_full_speed.set()
    expect_answer(ring)
    ring.wait_for(lambda: bool(ring.coordinator.of(m.HandedOver)), "HandedOver")
    assert [h.attempt for h in ring.coordinator.of(m.HandedOver)] == [2]


def test_a_dead_prefill_worker_frees_its_reservations_at_once(ring: Ring) -> None:
    """vllm-project/vllm#35943: KV that will never come kept its blocks for ever."""
    ring.start_decode()
    with closing(RawPrefill(ring)) as raw:
        raw.open("a", PROMPT)
        raw.answer(m.Grant)
        assert free_blocks(ring, "decode") < 64
        ring.peer_gone("raw")
        wait_until_empty(ring, "decode")
        raw.open("b", PROMPT)  # a dead process that still speaks
        refusal = raw.answer(m.Refuse)
        assert "dead" in refusal.reason and refusal.retriable
        raw.say(m.Commit("a", 0, ring.coordinator.epoch, (), 0))
        raw.answer(m.AbortAck)
    assert ring.coordinator.of(m.Failed) == []


def test_blocks_a_dead_peer_may_still_write_to_stay_out_of_use_until_it_is_reaped(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoreReceiver, "one_sided", True)
    ring.start_decode()
    decode = ring.workers["decode"]
    with closing(RawPrefill(ring)) as raw:
        raw.open("a", PROMPT)
        raw.answer(m.Grant)
        ring.peer_gone("raw")
        ring.wait_for(lambda: decode.stats().num_blocks_quarantined == 16, "quarantine")
        assert (decode.stats().num_blocks_reserved, free_blocks(ring, "decode")) == (16, 48)
        ring.ask("b", PROMPT, to=("decode", None))
        expect_answer(ring, request_id="b")
        assert decode.stats().num_blocks_quarantined == 16
        ring.peer_gone("raw", reaped=True)
        wait_until_empty(ring, "decode")


def kv_of(token_ids: tuple[int, ...]) -> bytes:
    """Random numbers of the right size: nobody may ever read them."""
    numbers = np.random.default_rng(5)
    return numbers.bytes(len(token_ids) * LAYOUT.token_bytes)


def test_a_late_frame_never_reaches_blocks_that_are_someone_elses(ring: Ring) -> None:
    """sgl-project/sglang PR#35360: a late write of an aborted transfer hit reused blocks."""
    ring.start_decode(num_blocks=20)  # of which each prompt takes 16
    runner = start_slow_prefill(ring)
    prompt = prompt_of(9, 60)
    decode = ring.workers["decode"]
    with closing(RawPrefill(ring)) as raw:
        raw.open("old", PROMPT)
        raw.answer(m.Grant)
        ring.release("old")
        wait_until_empty(ring, "decode", 20)
        ring.ask("a", prompt)
        ring.wait_for(lambda: decode.stats().num_kv_bytes_received > 0, "some KV has arrived")
        for _ in range(5):
            raw.frame("old", whole(LAYOUT, len(PROMPT)), kv_of(PROMPT))
        ring.wait_for(lambda: decode.stats().num_frames_dropped == 5, "they are dropped")
        runner.at_full_speed.set()
        expect_answer(ring, prompt)  # the fake model checks all KV that it reads


def test_frames_that_stop_coming_end_the_transfer_within_its_timeout(ring: Ring) -> None:
    """vllm-project/vllm#35943, #55181: a dropped frame, or a sender that froze, hung for ever."""
    ring.start_decode()
    with closing(RawPrefill(ring)) as raw:
        raw.open("a", PROMPT, clocks=(60.0, 0.2))
        raw.answer(m.Grant)
        half = PROMPT[:30]
        raw.frame("a", whole(LAYOUT, 30), kv_of(half))
        raw.answer(m.AbortAck)
        failed = wait_for_failure(ring)
        assert (failed.stage, failed.retriable) == ("transfer", True)
        wait_until_empty(ring, "decode")


def test_a_chunk_longer_than_the_stall_timeout_is_no_stall(ring: Ring) -> None:
    """vllm-project/vllm PR#45453: a long prefill is not a death."""
    ring.start_decode()
    runner = ring.start_prefill(max_num_batched_tokens=30)
    runner.step_s = 0.6
    runner.at_full_speed.clear()
    ring.ask("a", PROMPT, clocks=(60.0, 0.2))
    expect_answer(ring)
    assert ring.coordinator.of(m.Failed) == []


def test_a_prompt_behind_longer_ones_is_no_stall_either(ring: Ring) -> None:
    ring.start_decode()
    runner = ring.start_prefill(max_num_batched_tokens=20)
    runner.step_s = 0.15
    runner.at_full_speed.clear()
    ring.ask("long", prompt_of(4, 80), clocks=(60.0, 0.2))
    ring.ask("a", PROMPT, clocks=(60.0, 0.2))
    expect_answer(ring)
    ring.wait_for_tokens("long", 8)
    assert ring.coordinator.of(m.Failed) == []
