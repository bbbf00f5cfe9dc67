"""Processes die, and what was promised is kept: streams go on, and nobody else notices."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from splitserve import Client
from splitserve.errors import StreamBrokenError
from tests.cluster.clients import answers, ask, plain, prompt
from tests.cluster.faulty import TWO_EACH, FaultyRing
from tests.cluster.harness import Body
from tests.cluster.told import Told, tell
from tests.faults.pace import DECODING, FRAMES
from tests.waiting import wait_until

pytestmark = pytest.mark.breaking

NO_BYTES = {str(byte): -100 for byte in range(128, 256)}  # text stays ASCII
NUM_STREAMS = 50
POISON = 0xF5

FAULTY = TWO_EACH


def varied_bodies(ring: FaultyRing) -> list[Body]:
    """Greedy and seeded, with log-probabilities, choices, penalties, stop strings."""
    bodies: list[Body] = []
    for number in range(NUM_STREAMS):
        body: Body = {"prompt": prompt(number), "max_tokens": 60 + number % 20, "temperature": 0}
        body |= {"logit_bias": NO_BYTES, "ignore_eos": True}
        if number % 2:
            body |= {"temperature": 0.9, "seed": number, "top_p": 0.95}
        if number % 3 == 0:
            body["logprobs"] = 3
        if number % 5 == 0:
            body["n"] = 2
        if number % 7 == 1:
            body |= {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.1}
        bodies.append(body)
    for number in range(2, NUM_STREAMS, 6):
        text = tell(ring.base_url, bodies[number]).choices[0].text
        bodies[number]["stop"] = [text[45:48]]  # somewhere in the second half, or before
    return bodies


def tell_all(
    ring: FaultyRing, bodies: list[Body], meanwhile: Callable[[list[Told]], None] | None = None
) -> list[Told]:
    told = [Told() for _ in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        calls = [
            pool.submit(tell, ring.base_url, body, one)
            for body, one in zip(bodies, told, strict=True)
        ]
        if meanwhile is not None:
            meanwhile(told)
        return [call.result(90) for call in calls]


def test_streams_go_on_elsewhere_when_their_decode_worker_is_killed(ring: FaultyRing) -> None:
    """ai-dynamo/dynamo PR#7930, PR#1930: after a migration tokens were repeated or lost.

    Every stream loses its worker at a token of chance, in one of two rounds.
    """
    bodies = varied_bodies(ring)
    undisturbed = tell_all(ring, bodies)
    assert all(one.done for one in undisturbed)
    chance = random.Random(7)
    victims = [worker["pid"] for worker in ring.ready("decode")]
    before = ring.cluster()["coordinator"]["num_restarts"]
    for pid in victims:
        ring.pace.write(decode_step_s=0.02)
        target = chance.randrange(300, 1500)

        def kill(told: list[Told], pid: int = pid, target: int = target) -> None:
            wait_until(lambda: num_tokens(told) >= target, 30, f"{target} tokens out")
            os.kill(pid, signal.SIGKILL)
            ring.pace.write(decode_step_s=0.0)

        disturbed = tell_all(ring, bodies, kill)
        differences = {
            number: difference
            for number, (ours, right) in enumerate(zip(disturbed, undisturbed, strict=True))
            if (difference := ours.difference(right))
        }
        assert not differences
        ring.wait_whole()
    restarts = ring.cluster()["coordinator"]["num_restarts"] - before
    assert restarts >= NUM_STREAMS * 3 // 4, "too few streams lost their worker to tell anything"


def num_tokens(told: list[Told]) -> int:
    return sum(len(choice.token_ids) for one in told for choice in list(one.choices.values()))


def test_a_killed_coordinator_cuts_visibly_and_finds_its_workers_again(ring: FaultyRing) -> None:
    """kvcache-ai/Mooncake #2246: what only the master knew was lost with it."""
    right = ask(ring.base_url, plain(1)).token_ids
    pids = pids_of(ring.cluster())
    ring.pace.write(holding=True)
    held: Body = {"prompt": [DECODING, 0, *prompt(1)], "max_tokens": 40, "stream": True}
    with ThreadPoolExecutor(4) as pool, Client(ring.base_url) as client:
        streams = [pool.submit(ask, ring.base_url, held) for _ in range(2)]
        whole = pool.submit(ask, ring.base_url, {**held, "stream": False})
        stream = client.generate(held["prompt"], max_tokens=40, stream=True)
        next(stream)
        wait_until(lambda: len(ring.pace.marks()) >= 4, 10, "four requests held")
        ring.pace.forget_marks()
        os.kill(ring.coordinator_pid(), signal.SIGKILL)
        ring.pace.write(holding=False)
        assert [one.result(5).kind for one in (*streams, whole)] == ["broken"] * 3
        with pytest.raises(StreamBrokenError):
            list(stream)
    wait_until(lambda: answers(f"{ring.base_url}/live"), 10, "the coordinator at its address")
    returned = time.monotonic()
    ring.wait_whole()
    assert time.monotonic() - returned < 2, "workers came back late"
    assert pids_of(ring.cluster()) == pids
    assert ask(ring.base_url, plain(1)).token_ids == right


def pids_of(state: Body) -> dict[str, int]:
    """The living workers, and their processes."""
    return {w["worker_id"]: w["pid"] for w in state["workers"] if w["state"] != "dead"}


def test_decode_streams_do_not_notice_the_end_of_a_prefill_worker(ring: FaultyRing) -> None:
    """sgl-project/sglang #12779: the decode side's health check failed after it."""
    ring.pace.write(decode_step_s=0.01, holding=True)
    statuses: list[int] = []
    over = threading.Event()

    def watch() -> None:
        with httpx.Client(base_url=ring.base_url, timeout=1.0) as http:
            while not over.wait(0.05):
                statuses.append(http.get("/health").status_code)

    with ThreadPoolExecutor(16) as pool:
        running = [
            pool.submit(ask, ring.base_url, plain(n, max_tokens=200, stream=True)) for n in range(4)
        ]
        moving = []
        for serial in range(4):
            body = {"prompt": [FRAMES, serial, *prompt(serial, 120)], "max_tokens": 8}
            moving.append(pool.submit(ask, ring.base_url, body))
            mark = ring.wait_marked((FRAMES, serial))
        watching = pool.submit(watch)
        os.kill(ring.pid_of(mark["prefill"]), signal.SIGKILL)
        ring.pace.write(holding=False)
        assert [one.result(10).kind for one in moving] == ["whole"] * 4
        outcomes = [one.result(20) for one in running]
        over.set()
        watching.result(5)
    assert [len(outcome.token_ids) for outcome in outcomes] == [200] * 4
    # A death is noticed after 3 s when it has to be noticed by silence.
    assert max(max(outcome.gaps_s) for outcome in outcomes) < 1.0
    assert set(statuses) == {200}


def test_long_steps_of_a_busy_worker_do_not_look_like_its_death(ring: FaultyRing) -> None:
    """vllm-project/vllm PR#45453: a long prefill was taken for a dead process."""
    before = ring.cluster()
    ring.pace.write(prefill_step_s=4.0, busy=True)  # longer than the silence of the dead
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(ask, ring.base_url, plain(n)) for n in range(2)]
        assert [call.result(30).kind for call in calls] == ["whole"] * 2
    after = ring.cluster()
    assert pids_of(after) == pids_of(before)
    assert after["coordinator"]["num_restarts"] == before["coordinator"]["num_restarts"]


def test_a_prompt_no_worker_can_compute_fails_soon_and_alone(ring: FaultyRing) -> None:
    """sgl-project/sglang #9726: prefill failed, and decode waited for its KV."""
    right = [ask(ring.base_url, plain(n)).token_ids for n in range(4)]
    ring.pace.write(poison=POISON)
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(ask, ring.base_url, plain(n)) for n in range(4)]
        started = time.monotonic()
        bad = ask(ring.base_url, plain(0, prompt=[POISON, *prompt(0)]))
        assert (bad.kind, bad.status) == ("error", 500)
        assert "poison" in bad.message
        assert bad.ended_at - started < 1
        assert [other.result(10).token_ids for other in others] == right
