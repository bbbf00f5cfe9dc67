"""One worker of each kind: whoever dies, there is no other to go on with."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from splitserve import Client
from splitserve.errors import RequestFailedError
from tests.cluster.clients import answers, ask, plain, prompt
from tests.cluster.faulty import FaultyRing
from tests.cluster.harness import Body
from tests.faults.pace import DECODING
from tests.waiting import wait_until

pytestmark = pytest.mark.breaking

MAX_STEP_S = 4  # a first step on a busy machine may take a second or two
FAULTY = {"prefill": 1, "decode": 1, "max_step_s": MAX_STEP_S}


def test_the_last_decode_worker_dies_in_an_answer(ring: FaultyRing) -> None:
    """gpustack/gpustack #5939, vllm-project/vllm-ascend #13140: a cut answer looked whole."""
    right = ask(ring.base_url, plain(1)).token_ids
    ring.pace.write(holding=True)
    held: Body = {"prompt": [DECODING, 1, *prompt(1)], "max_tokens": 40, "stream": True}
    with ThreadPoolExecutor(2) as pool, Client(ring.base_url) as client:
        streamed = pool.submit(ask, ring.base_url, held)
        stream = client.generate(held["prompt"], max_tokens=40, stream=True)
        next(stream)
        wait_until(lambda: len(ring.pace.marks()) == 2, 10, "two streams held")
        (worker,) = ring.ready("decode")
        os.kill(worker["pid"], signal.SIGKILL)
        ring.pace.write(holding=False)
        outcome = streamed.result(5)
        assert (outcome.kind, outcome.status) == ("error", 200)
        assert worker["worker_id"] in outcome.message
        with pytest.raises(RequestFailedError):
            list(stream)
        refused = ask(ring.base_url, plain(1))
        assert (refused.kind, refused.status) == ("error", 503)
    ring.wait_whole()
    assert ask(ring.base_url, plain(1)).token_ids == right


def test_a_worker_that_comes_back_is_another_one(ring: FaultyRing) -> None:
    """smg-project/smg PR#2492: decode kept the old address of a restarted prefill, and hung.

    Meanwhile decode computes prompts by itself (llm-d/llm-d-router #2427).
    """
    right = ask(ring.base_url, plain(1)).token_ids
    (decode,) = ring.ready("decode")
    (prefill,) = ring.ready("prefill")
    os.kill(prefill["pid"], signal.SIGKILL)
    started = time.monotonic()
    assert ask(ring.base_url, plain(1)).token_ids == right
    assert time.monotonic() - started < 5
    ring.wait_whole()
    num_local = ring.cluster()["coordinator"]["num_local_prefills"]
    assert num_local >= 1
    assert ask(ring.base_url, plain(1)).token_ids == right
    assert ring.cluster()["coordinator"]["num_local_prefills"] == num_local
    assert ring.ready("prefill")[0]["worker_id"] != prefill["worker_id"]
    assert ring.ready("decode")[0]["pid"] == decode["pid"]
    os.kill(decode["pid"], signal.SIGKILL)
    wait_until(lambda: not ring.is_whole(), 5, "news of the death")
    ring.wait_whole()
    assert ask(ring.base_url, plain(1)).token_ids == right


def test_a_wedged_engine_is_not_healthy_and_is_replaced(ring: FaultyRing) -> None:
    """vllm-project/vllm #39863: health was 200 for 85 minutes while the engine stood still."""
    (worker,) = ring.ready("decode")
    ring.pace.write(frozen=worker["worker_id"])
    with ThreadPoolExecutor(1) as pool:
        started = time.monotonic()
        stuck = pool.submit(ask, ring.base_url, plain(1, stream=True))
        wait_until(lambda: not answers(f"{ring.base_url}/health"), 10, "bad health")
        assert time.monotonic() - started < MAX_STEP_S + 2  # and some beats
        outcome = stuck.result(5)
        assert outcome.kind == "error"
        assert "stuck" in outcome.message
    ring.wait_whole()
    assert not os.path.exists(f"/proc/{worker['pid']}"), "the wedged process was not killed"
    assert ask(ring.base_url, plain(1)).kind == "whole"
