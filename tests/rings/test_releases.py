"""Releases, deaths and late messages, over real sockets: blocks come back, and once only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from kv_transfer.receiver import StoreReceiver
from splitserve.wire import messages as m
from tests.fake_runner import LAYOUT
from tests.fake_store import whole
from tests.ring import RawPrefill, Ring, open_ring, prompt_of

PROMPT = prompt_of(1, 60)


@pytest.fixture
def ring() -> Iterator[Ring]:
    with open_ring() as ring:
        yield ring


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
            assert ring.num_free("decode") == 64
        raw.open("a", PROMPT, attempt=2)
        assert raw.answer(m.Grant).attempt == 2
        raw.open("a", PROMPT, attempt=1)
        assert raw.answer(m.AbortAck).attempt == 1
        raw.say(m.Abort("a", 2, ring.coordinator.epoch))
        raw.answer(m.AbortAck)


def test_a_newer_attempt_ends_the_older_ones(ring: Ring) -> None:
    ring.start_decode()
    runner = ring.start_slow_prefill("p0")
    ring.start_prefill("p1")
    ring.ask("a", PROMPT, to=("p0", "decode"))
    decode = ring.workers["decode"]
    ring.wait_for(lambda: decode.stats().num_kv_bytes_received > 0, "some KV has arrived")
    ring.ask(("a", 1), PROMPT, to=("p1", "decode"))
    ring.expect_answer("a", PROMPT)
    ring.wait_until_empty("decode")
    runner.at_full_speed.set()
    failed = ring.first_failure()  # p0 hears from the decode worker that it is out of date
    assert (failed.attempt, failed.kept) == (0, True)
    ring.coordinator.release("p0", "a")


def test_a_newer_prefill_ends_the_older_one_where_it_is(ring: Ring) -> None:
    ring.start_decode()
    runner = ring.start_slow_prefill()
    ring.ask("a", PROMPT)
    decode = ring.workers["decode"]
    ring.wait_for(lambda: decode.stats().num_kv_bytes_received > 0, "some KV has arrived")
    ring.ask(("a", 2), PROMPT)
    runner.at_full_speed.set()
    ring.expect_answer("a", PROMPT)
    ring.wait_for(lambda: bool(ring.coordinator.of(m.HandedOver)), "HandedOver")
    assert [h.attempt for h in ring.coordinator.of(m.HandedOver)] == [2]


def test_a_dead_prefill_worker_frees_its_reservations_at_once(ring: Ring) -> None:
    """vllm-project/vllm#35943: KV that will never come kept its blocks for ever."""
    ring.start_decode()
    with closing(RawPrefill(ring)) as raw:
        raw.open("a", PROMPT)
        raw.answer(m.Grant)
        assert ring.num_free("decode") < 64
        ring.peer_gone("raw")
        ring.wait_until_empty("decode")
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
        assert (decode.stats().num_blocks_reserved, ring.num_free("decode")) == (16, 48)
        ring.ask("b", PROMPT, to=("decode", None))
        ring.expect_answer("b", PROMPT)
        assert decode.stats().num_blocks_quarantined == 16
        ring.peer_gone("raw", reaped=True)
        ring.wait_until_empty("decode")


def kv_of(token_ids: tuple[int, ...]) -> bytes:
    """Random numbers of the right size: nobody may ever read them."""
    numbers = np.random.default_rng(5)
    return numbers.bytes(len(token_ids) * LAYOUT.token_bytes)


def test_a_late_frame_never_reaches_blocks_that_are_someone_elses(ring: Ring) -> None:
    """sgl-project/sglang PR#35360: a late write of an aborted transfer hit reused blocks."""
    ring.start_decode(num_blocks=20)  # of which each prompt takes 16
    runner = ring.start_slow_prefill()
    prompt = prompt_of(9, 60)
    decode = ring.workers["decode"]
    with closing(RawPrefill(ring)) as raw:
        raw.open("old", PROMPT)
        raw.answer(m.Grant)
        ring.release("old")
        ring.wait_until_empty("decode")
        ring.ask("a", prompt)
        ring.wait_for(lambda: decode.stats().num_kv_bytes_received > 0, "some KV has arrived")
        for _ in range(5):
            raw.frame("old", whole(LAYOUT, len(PROMPT)), kv_of(PROMPT))
        ring.wait_for(lambda: decode.stats().num_frames_dropped == 5, "they are dropped")
        runner.at_full_speed.set()
        ring.expect_answer("a", prompt)  # the fake model checks all KV that it reads


def test_frames_that_stop_coming_end_the_transfer_within_its_timeout(ring: Ring) -> None:
    """vllm-project/vllm#35943, #55181: a dropped frame, or a sender that froze, hung for ever."""
    ring.start_decode()
    with closing(RawPrefill(ring)) as raw:
        raw.open("a", PROMPT, clocks=(60.0, 0.2))
        raw.answer(m.Grant)
        half = PROMPT[:30]
        raw.frame("a", whole(LAYOUT, 30), kv_of(half))
        raw.answer(m.AbortAck)
        failed = ring.first_failure()
        assert (failed.stage, failed.retriable) == ("transfer", True)
        ring.wait_until_empty("decode")


def test_a_chunk_longer_than_the_stall_timeout_is_no_stall(ring: Ring) -> None:
    """vllm-project/vllm PR#45453: a long prefill is not a death."""
    ring.start_decode()
    runner = ring.start_prefill(max_num_batched_tokens=30)
    runner.step_s = 1.2
    runner.at_full_speed.clear()
    ring.ask("a", PROMPT, clocks=(60.0, 0.5))
    ring.expect_answer("a", PROMPT)
    assert ring.coordinator.of(m.Failed) == []


def test_a_prompt_behind_longer_ones_is_no_stall_either(ring: Ring) -> None:
    ring.start_decode()
    runner = ring.start_prefill(max_num_batched_tokens=20)
    runner.step_s = 0.25
    runner.at_full_speed.clear()
    ring.ask("long", prompt_of(4, 80), clocks=(60.0, 0.5))
    ring.ask("a", PROMPT, clocks=(60.0, 0.5))
    ring.expect_answer("a", PROMPT)
    ring.wait_for_tokens("long", 8)
    assert ring.coordinator.of(m.Failed) == []
