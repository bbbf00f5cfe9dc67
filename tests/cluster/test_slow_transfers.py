"""Transfers that are slow, or have to wait: nobody else does, and nothing is given up."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cluster.clients import ask, plain, prompt
from tests.cluster.faulty import FaultyRing
from tests.faults.pace import RESERVED

pytestmark = pytest.mark.breaking

STALL_S = 1.0
FAULTY = {"prefill": 1, "decode": 1, "stall_timeout_s": STALL_S, "decode_max_num_seqs": 4}


def test_a_stream_goes_on_while_kv_is_written_slowly(ring: FaultyRing) -> None:
    """vllm-project/vllm #13816: receiving KV within the decode step stalled all streams."""
    ring.pace.write(write_s=0.05, decode_step_s=0.005)
    with ThreadPoolExecutor(4) as pool:
        stream = pool.submit(ask, ring.base_url, plain(0, max_tokens=300, stream=True))
        others = [
            pool.submit(ask, ring.base_url, plain(n, prompt=prompt(n, 400), max_tokens=2))
            for n in range(1, 4)
        ]
        assert [other.result(30).kind for other in others] == ["whole"] * 3
        is_running = not stream.done()
        outcome = stream.result(30)
    assert is_running, "the stream ended before the transfers: nothing was tried"
    assert len(outcome.token_ids) == 300
    assert max(outcome.gaps_s[1:]) < 0.3  # but for the gap of its own hand-off


def test_requests_that_only_wait_for_room_are_never_given_up(ring: FaultyRing) -> None:
    """lightseekorg/tokenspeed PR#1427: prefill timed out what was merely queued on decode."""
    right = [ask(ring.base_url, plain(n)).token_ids for n in range(16)]
    num_restarts = ring.cluster()["coordinator"]["num_restarts"]
    ring.pace.write(decode_step_s=0.03)  # 1.2 s an answer, four at a time
    started = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        outcomes = list(pool.map(lambda n: ask(ring.base_url, plain(n)), range(16)))
    assert [outcome.token_ids for outcome in outcomes] == right
    assert time.monotonic() - started > 3 * STALL_S, "nobody had to wait: nothing was tried"
    assert ring.cluster()["coordinator"]["num_restarts"] == num_restarts


def test_a_transfer_that_stands_still_is_begun_again_elsewhere(ring: FaultyRing) -> None:
    """vllm-project/vllm #35943: a transfer without progress held its blocks for ever."""
    body = plain(0, prompt=[RESERVED, 1, *prompt(1, 100)])
    right = ask(ring.base_url, body).token_ids
    ring.pace.write(holding=True)  # its first attempt only
    started = time.monotonic()
    outcome = ask(ring.base_url, body)
    assert outcome.token_ids == right
    assert STALL_S * 0.9 < outcome.ended_at - started < STALL_S + 2
