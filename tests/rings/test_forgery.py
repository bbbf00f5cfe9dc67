"""Hand-offs that are none: driven at a decode worker over real sockets, while others use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest

from splitserve.wire import messages as m
from tests.fake_runner import LAYOUT
from tests.fake_store import whole
from tests.ring import RawPrefill, Ring, open_ring, prompt_of

PROMPT = prompt_of(1, 60)
VICTIM = prompt_of(9, 60)
FORGED_TOKEN = 77


@pytest.fixture
def ring() -> Iterator[Ring]:
    with open_ring() as ring:
        yield ring


def kv_of(num_tokens: int) -> bytes:
    """Random numbers of the right size, with a right checksum: nobody may ever read them."""
    return np.random.default_rng(5).bytes(num_tokens * LAYOUT.token_bytes)


def commit(ring: Ring, request_id: str, attempt: int = 0) -> m.Commit:
    first = m.TokenRow(request_id, attempt, 0, 0, (FORGED_TOKEN,))
    num_kv_bytes = len(PROMPT) * LAYOUT.token_bytes
    return m.Commit(request_id, attempt, ring.coordinator.epoch, (first,), num_kv_bytes)


def unknown(ring: Ring, raw: RawPrefill) -> None:
    """Nobody has ever opened it."""


def consumed(ring: Ring, raw: RawPrefill) -> None:
    """Its KV came, and its answer was written to the end."""
    ring.ask("old", PROMPT)
    ring.expect_answer("old", PROMPT)


def released(ring: Ring, raw: RawPrefill) -> None:
    """It was granted, and its client hung up."""
    raw.open("old", PROMPT)
    raw.answer(m.Grant)
    ring.release("old")


def expired(ring: Ring, raw: RawPrefill) -> None:
    """It was granted, and its deadline has passed."""
    raw.open("old", PROMPT, clocks=(0.1, 10.0))
    raw.answer(m.Grant)
    raw.answer(m.AbortAck)
    assert ring.first_failure().stage == "deadline"


def overtaken(ring: Ring, raw: RawPrefill) -> None:
    """It was granted, then a newer attempt was, and ended."""
    raw.open("old", PROMPT)
    raw.answer(m.Grant)
    raw.open("old", PROMPT, attempt=1)
    raw.answer(m.Grant)
    raw.say(m.Abort("old", 1, ring.coordinator.epoch))
    raw.answer(m.AbortAck)


@pytest.mark.parametrize("history", [unknown, consumed, released, expired, overtaken])
def test_the_ids_of_a_hand_off_that_is_over_open_nothing(
    ring: Ring, history: Callable[[Ring, RawPrefill], None]
) -> None:
    """vllm-project/vllm #52234, PR#52232, wtdcode/vllm-backport #33: a stale handle, or one used
    before, read blocks that were another user's by then, and the answer was that user's."""
    ring.start_decode(num_blocks=20)  # of which each prompt takes 16
    runner = ring.start_prefill(max_num_batched_tokens=4)
    decode = ring.workers["decode"]
    with closing(RawPrefill(ring)) as raw:
        history(ring, raw)
        ring.wait_until_empty("decode")
        before = ring.rows("old")
        runner.at_full_speed.clear()
        ring.ask("victim", VICTIM)  # gets the same blocks
        num_bytes = decode.stats().num_kv_bytes_received
        ring.wait_for(lambda: decode.stats().num_kv_bytes_received > num_bytes, "some KV is here")
        num_dropped = decode.stats().num_frames_dropped
        raw.frame("old", whole(LAYOUT, len(PROMPT)), kv_of(len(PROMPT)))
        raw.say(commit(ring, "old"))
        assert raw.answer(m.AbortAck).request_id == "old"
        assert decode.stats().num_frames_dropped == num_dropped + 1
        runner.at_full_speed.set()
        ring.expect_answer("victim", VICTIM)  # the fake model checks all KV that it reads
    assert ring.rows("old") == before


def test_a_hand_off_that_is_repeated_while_its_answer_is_written_changes_nothing(
    ring: Ring,
) -> None:
    """vllm-project/vllm #52234: a handle could be used twice."""
    runner = ring.start_decode()
    ring.start_prefill()
    runner.at_full_speed.clear()
    ring.ask("old", PROMPT, max_tokens=40)
    ring.wait_for_tokens("old", 3)
    with closing(RawPrefill(ring)) as raw:
        raw.open("old", PROMPT)
        refusal = raw.answer(m.Refuse)
        assert "already here" in refusal.reason and not refusal.retriable
        raw.frame("old", whole(LAYOUT, len(PROMPT)), kv_of(len(PROMPT)))
        raw.say(commit(ring, "old"))
        raw.answer(m.AbortAck)
    runner.at_full_speed.set()
    ring.expect_answer("old", PROMPT, 40)


def test_the_commit_of_an_older_attempt_does_not_end_the_newer_one(ring: Ring) -> None:
    """vllm-project/vllm #52234: what was sent carried no name, so anyone's end was everyone's."""
    ring.start_decode()
    runner = ring.start_slow_prefill()
    decode = ring.workers["decode"]
    with closing(RawPrefill(ring)) as raw:
        raw.open("a", PROMPT)
        raw.answer(m.Grant)
        ring.ask(("a", 1), PROMPT)
        ring.wait_for(lambda: decode.stats().num_kv_bytes_received > 0, "some KV has arrived")
        assert raw.answer(m.AbortAck).attempt == 0
        raw.frame("a", whole(LAYOUT, len(PROMPT)), kv_of(len(PROMPT)))
        raw.say(commit(ring, "a"))
        assert raw.answer(m.AbortAck).attempt == 0
        runner.at_full_speed.set()
        ring.expect_answer("a", PROMPT)
    assert decode.stats().num_frames_dropped == 1


OUTSIDE = {
    "tokens behind the prompt": m.Region(0, LAYOUT.num_layers, 60, 120, 0, LAYOUT.num_kv_heads),
    "layers that are none": m.Region(3, 6, 0, 60, 0, LAYOUT.num_kv_heads),
    "heads that are none": m.Region(0, LAYOUT.num_layers, 0, 60, 2, 4),
}


@pytest.mark.parametrize("region", OUTSIDE.values(), ids=OUTSIDE.keys())
def test_kv_outside_of_what_was_granted_is_no_success(ring: Ring, region: m.Region) -> None:
    """vllm-project/vllm #52234: places out of range were read, and it was a 200.

    Only names of the request's own tokens travel, so a place is wrong only against its grant.
    """
    ring.start_decode()
    with closing(RawPrefill(ring)) as raw:
        raw.open("a", PROMPT)
        raw.answer(m.Grant)
        raw.frame("a", region, kv_of(len(PROMPT)))
        raw.say(commit(ring, "a"))
        everything = whole(LAYOUT, len(PROMPT))
        assert raw.answer(m.Incomplete).missing == (everything,)
        raw.say(commit(ring, "a"))
        raw.answer(m.AbortAck)  # a second time the transfer has failed
    failed = ring.first_failure()
    assert (failed.stage, failed.retriable) == ("transfer", True)
    assert ring.workers["decode"].stats().num_frames_dropped == 1
    assert ring.rows("a") == {}
