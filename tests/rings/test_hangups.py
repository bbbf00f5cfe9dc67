"""Clients that leave while KV moves: both sides are free at once, others notice nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from splitserve.wire import messages as m
from tests.fake_runner import LAYOUT
from tests.ring import Ring, open_ring, prompt_of

PROMPT = prompt_of(1, 60)
FREED_S = 1.0


@pytest.fixture
def ring() -> Iterator[Ring]:
    with open_ring() as ring:
        yield ring


def test_a_hundred_hang_ups_in_mid_transfer_leave_the_connection_whole(ring: Ring) -> None:
    """ai-dynamo/dynamo PR#7489: the transport was torn down under a transfer, and its blocks
    leaked. Here others' KV goes over the same connection all the time."""
    ring.start_decode(num_blocks=40)
    runner = ring.start_prefill(num_blocks=40, max_num_batched_tokens=4)
    runner.at_full_speed.clear()
    runner.step_s = 0.002
    decode = ring.workers["decode"]
    for number in range(100):
        gone, stays = f"gone{number}", f"stays{number}"
        more_than_others = decode.stats().num_kv_bytes_received + 9 * LAYOUT.token_bytes
        ring.ask(gone, PROMPT)
        ring.wait_for(
            lambda seen=more_than_others: decode.stats().num_kv_bytes_received > seen,  # type: ignore[misc]
            "some of its KV has arrived",
        )
        ring.ask(stays, prompt_of(number, 9), max_tokens=3)
        ring.release(gone)
    runner.at_full_speed.set()
    for number in range(100):
        ring.expect_answer(f"stays{number}", prompt_of(number, 9), 3)
    ring.wait_for(ring.drained, "all is freed")
    in_time = [h for h in ring.coordinator.of(m.HandedOver) if h.request_id.startswith("gone")]
    assert len(in_time) < 10, "they were not hung up in mid-transfer: nothing was tried"
    # A Release may reach the decode worker first; the prefill worker then hears AbortAck.
    assert all(f.request_id.startswith("gone") for f in ring.coordinator.of(m.Failed))
    ring.ask("after", PROMPT)
    ring.expect_answer("after", PROMPT)


@pytest.mark.parametrize("told", ["both", "prefill"])
def test_a_hang_up_between_the_legs_frees_prefills_blocks_at_once(ring: Ring, told: str) -> None:
    """llm-d/llm-d PR#1138: prefill was done and decode had not begun, so nobody cleaned up.

    The decode worker is stuck in a step: it has answered nothing yet, and can't.
    """
    stuck = ring.start_decode()
    ring.start_prefill()
    stuck.step_s = 60.0
    stuck.at_full_speed.clear()
    ring.ask("busy", prompt_of(2, 8), to=("decode", None))
    decode = ring.workers["decode"]
    ring.wait_for(lambda: bool(decode.scheduler.sequences), "it computes")
    ring.ask("a", PROMPT)
    ring.wait_for(lambda: bool(ring.coordinator.of(m.FirstToken)), "the prompt is computed")
    assert ring.num_free("prefill") < 64
    started = time.monotonic()
    for worker in ("prefill", "decode") if told == "both" else ("prefill",):
        ring.coordinator.release(worker, "a")
    ring.wait_until_empty("prefill")
    assert time.monotonic() - started < FREED_S
    stuck.at_full_speed.set()
    ring.expect_answer("busy", prompt_of(2, 8))
    ring.wait_until_empty("decode")
    assert set(ring.rows("a")) == {0}, "nothing but the first token came of it"


def test_a_hang_up_in_decodes_line_frees_prefills_blocks_at_once(ring: Ring) -> None:
    """llm-d/llm-d PR#1138, while the prompt waits for room."""
    decode = ring.start_decode(max_num_seqs=1, num_blocks=200)
    ring.start_prefill()
    decode.at_full_speed.clear()
    ring.ask("long", prompt_of(2, 5), max_tokens=400)
    ring.wait_for_tokens("long", 2)
    ring.ask("a", PROMPT)
    ring.wait_for(lambda: ring.workers["decode"].stats().num_requests_waiting == 1, "it waits")
    ring.wait_for(lambda: len(ring.coordinator.of(m.FirstToken)) == 2, "the prompt is computed")
    started = time.monotonic()
    ring.release("a")
    ring.wait_until_empty("prefill")
    assert time.monotonic() - started < FREED_S
    decode.at_full_speed.set()
    ring.expect_answer("long", prompt_of(2, 5), 400)


def test_answers_that_come_after_a_cancel_end_no_worker(ring: Ring) -> None:
    """sgl-project/sglang-omni PR#1773: the acknowledgement that a cancelled transfer waited for
    raised in a watcher that took every exception for the end: the prefill process left.

    The decode worker finds Open and Abort behind a long step, and answers both; nobody waits.
    """
    stuck = ring.start_decode()
    ring.start_prefill()
    decode = ring.workers["decode"]
    for number in range(5):
        busy, cancelled = f"busy{number}", f"cancelled{number}"
        stuck.step_s = 60.0
        stuck.at_full_speed.clear()
        ring.ask(busy, prompt_of(number, 8), to=("decode", None))
        ring.wait_for(lambda: bool(decode.scheduler.sequences), "it computes")
        ring.ask(cancelled, PROMPT)
        ring.wait_for(lambda name=cancelled: bool(ring.rows(name)), "opened and computed")  # type: ignore[misc]
        ring.coordinator.release("prefill", cancelled)
        ring.wait_until_empty("prefill")
        stuck.at_full_speed.set()
        ring.expect_answer(busy, prompt_of(number, 8))
    ring.ask("after", PROMPT)
    ring.expect_answer("after", PROMPT)
    assert not ring.has_left("prefill") and not ring.has_left("decode")
    assert ring.coordinator.of(m.Failed) == []
