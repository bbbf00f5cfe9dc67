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
