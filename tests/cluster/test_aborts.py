"""Clients that hang up at any moment: nothing of their requests stays anywhere."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cluster.clients import Abortable, ask, plain, prompt
from tests.cluster.faulty import FaultyRing
from tests.cluster.harness import Body, show
from tests.faults.pace import FRAMES
from tests.waiting import wait_until

pytestmark = pytest.mark.breaking

FAULTY = {"prefill": 2, "decode": 2, "num_blocks": 48}
NUM_ROUNDS = 25
NUM_AT_ONCE = 8  # 200 aborts together
LONGEST_S = 0.4  # from a request to its abort; about what a whole answer takes
FREED_S = 1.0
POISON = 0xF5


def slow(number: int) -> Body:
    """A request whose transfer has eight frames, streamed or not."""
    options: Body = {"max_tokens": 30, "ignore_eos": True, "stream": number % 2 == 0}
    return {"prompt": prompt(number, 120), "temperature": 0, **options}


def freed_within(is_free: Callable[[], bool], what: str) -> float:
    started = time.monotonic()
    wait_until(is_free, 10, what)
    return time.monotonic() - started


def test_aborts_at_any_moment_free_every_block(
    ring: FaultyRing, request: pytest.FixtureRequest
) -> None:
    """vllm-project/vllm #46283, sgl-project/sglang PR#35360: blocks were held until a completion
    that never came, or given away while the transfer still wrote to them."""
    right = [ask(ring.base_url, plain(n, prompt=prompt(n, 120))).token_ids for n in range(4)]
    ring.pace.write(frame_s=0.02, decode_step_s=0.005)
    chance = random.Random(3)
    took_s, num_in_transfer = [], 0
    for number in range(NUM_ROUNDS):
        waits_s = sorted(chance.uniform(0, LONGEST_S) for _ in range(NUM_AT_ONCE))
        abort_at = time.monotonic() + waits_s[-1]
        open_ones = []
        for index, wait_s in enumerate(reversed(waits_s)):
            wait_until_time(abort_at - wait_s)
            open_ones.append(Abortable(ring.base_url, slow(NUM_AT_ONCE * number + index)))
        wait_until_time(abort_at)
        num_in_transfer += ring.total("decode", "num_transfers_in_flight")
        for one in open_ones:
            one.abort()
        if number % 5 == 4:  # those who come right behind get the freed blocks
            with ThreadPoolExecutor(4) as pool:
                bodies = [plain(n, prompt=prompt(n, 120)) for n in range(4)]
                later = pool.map(lambda body: ask(ring.base_url, body), bodies)
                assert [outcome.token_ids for outcome in later] == right
        else:
            what = f"round {number} freed"
            took_s.append(freed_within(lambda: not ring.leftovers(), what))
        ring.assert_drained()
    worst = f"worst {max(took_s):.3f} s, mean {sum(took_s) / len(took_s):.3f} s"
    num_aborts = NUM_ROUNDS * NUM_AT_ONCE
    show(
        request.config,
        f"Blocks freed after {num_aborts} aborts ({num_in_transfer} in transfer): {worst}",
        [],
    )
    assert max(took_s) < FREED_S
    assert num_in_transfer > NUM_ROUNDS // 2, "too few aborts hit a transfer to tell anything"


def wait_until_time(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def test_an_abort_frees_the_living_side_of_a_frozen_peer_at_once(ring: FaultyRing) -> None:
    """vllm-project/vllm PR#41269: the prompt's blocks were held for 480 s."""
    ring.pace.write(holding=True)
    held = Abortable(ring.base_url, {**slow(0), "prompt": [FRAMES, 0, *prompt(0, 118)]})
    mark = ring.wait_marked((FRAMES, 0))
    pid = ring.pid_of(mark["decode"])
    os.kill(pid, signal.SIGSTOP)
    held.abort()
    took_s = freed_within(lambda: ring.total("prefill", "num_blocks_used") == 0, "prefill freed")
    assert took_s < FREED_S
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), 8, "the frozen worker killed")


def test_counters_are_exact_after_aborts_errors_and_a_death(ring: FaultyRing) -> None:
    """vllm-project/router PR#215: loads leaked with each abort, until one worker got it all."""
    ring.pace.write(poison=POISON)
    chance = random.Random(11)
    fates = [chance.choices(("answer", "abort", "error"), (5, 4, 1))[0] for _ in range(500)]

    def run(number: int) -> str:
        body = plain(number % 40, max_tokens=12, ignore_eos=True)
        if number == len(fates) // 2:
            os.kill(ring.ready("decode")[0]["pid"], signal.SIGKILL)
        if fates[number] == "abort":
            one = Abortable(ring.base_url, body)
            time.sleep(number % 50 / 1000)
            one.abort()
            return "abort"
        if fates[number] == "error":
            body["prompt"] = [POISON, *prompt(number)]
        return "answer" if ask(ring.base_url, body).kind == "whole" else "error"

    with ThreadPoolExecutor(16) as pool:
        assert Counter(pool.map(run, range(len(fates)))) == Counter(fates)
    ring.wait_whole()
    ring.assert_drained()
    counts: Counter[str] = Counter()
    for number in range(100):
        answer = ring.complete(prompt(number % 40), max_tokens=3, return_timing=True)
        timing = answer["timing"]
        counts.update((timing["prefill_worker_id"], timing["decode_worker_id"]))
    assert sorted(counts) == sorted(w["worker_id"] for w in ring.cluster_alive())
    assert all(35 <= number <= 65 for number in counts.values()), counts
