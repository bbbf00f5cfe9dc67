"""Several things at once: pauses that are no deaths, deaths in the middle of a recovery."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from splitserve import Client
from tests.cluster.clients import ask, plain, prompt
from tests.cluster.faulty import FaultyRing, processes_of
from tests.cluster.harness import Body
from tests.faults.pace import DECODING
from tests.waiting import wait_until

pytestmark = pytest.mark.breaking

FAULTY = {"prefill": 1, "decode": 2}


def living(ring: FaultyRing) -> dict[str, int]:
    return {w["worker_id"]: w["pid"] for w in ring.cluster_alive()}


def pause(pids: list[int], seconds: float) -> None:
    """Stop processes for a while, all of them at once."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def test_short_pauses_of_any_process_are_no_deaths(ring: FaultyRing) -> None:
    """doublewordai/control-layer #1512: busy ones were taken for dead and ejected."""
    right = [ask(ring.base_url, plain(n, max_tokens=200)).token_ids for n in range(4)]
    before, coordinator = living(ring), ring.coordinator_pid()
    ring.pace.write(decode_step_s=0.02)
    with ThreadPoolExecutor(4) as pool:
        calls = [
            pool.submit(ask, ring.base_url, plain(n, max_tokens=200, stream=True)) for n in range(4)
        ]
        pause([coordinator], 1.5)
        pause([*before.values()], 1.5)
        assert [call.result(30).token_ids for call in calls] == right
    assert living(ring) == before
    assert ring.coordinator_pid() == coordinator
    assert ring.cluster()["coordinator"]["num_restarts"] == 0


def test_a_coordinator_and_a_worker_die_at_once(ring: FaultyRing) -> None:
    """The next coordinator finds one worker less than is wanted, and starts it."""
    right = ask(ring.base_url, plain(1)).token_ids
    victim = ring.ready("decode")[0]
    for pid in (ring.coordinator_pid(), victim["pid"]):
        os.kill(pid, signal.SIGKILL)
    ring.wait_whole()
    assert victim["worker_id"] not in living(ring)
    assert ask(ring.base_url, plain(1)).token_ids == right


def test_a_worker_dies_while_the_next_one_starts(ring: FaultyRing) -> None:
    """exo-explore/exo #1591: a crash in the warm-up left the instance in it for ever."""
    directory = str(ring.pace.directory)
    known = set(processes_of(directory))
    os.kill(ring.ready("prefill")[0]["pid"], signal.SIGKILL)
    wait_until(lambda: bool(set(processes_of(directory)) - known), 15, "its successor's process")
    for pid in set(processes_of(directory)) - known:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not ring.is_whole(), 5, "news of the death")
    ring.wait_whole()
    assert ask(ring.base_url, plain(1)).kind == "whole"


def test_a_size_asked_for_outlives_the_coordinator(ring: FaultyRing) -> None:
    """Also when it dies before the workers it asked for are there."""
    with Client(ring.base_url) as client:
        client.scale(prefill=2, decode=1)
        os.kill(ring.coordinator_pid(), signal.SIGKILL)
        ring.wait_whole()
        assert ring.cluster()["target"] == {"prefill": 2, "decode": 1}
        assert [len(ring.ready(role)) for role in ("prefill", "decode")] == [2, 1]
        client.scale(prefill=1, decode=2)
        ring.wait_whole()


def test_all_decode_workers_die_in_the_middle_of_answers(ring: FaultyRing) -> None:
    """ai-dynamo/dynamo #13088: under churn some requests had neither an answer nor an error."""
    ring.pace.write(holding=True)
    body: Body = {"prompt": [DECODING, 2, *prompt(2)], "max_tokens": 40}
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(ask, ring.base_url, {**body, "stream": n % 2 == 0}) for n in range(4)]
        wait_until(lambda: len(ring.pace.marks()) == 4, 10, "four requests held")
        killed = time.monotonic()
        for worker in ring.ready("decode"):
            os.kill(worker["pid"], signal.SIGKILL)
        ring.pace.write(holding=False)
        outcomes = [call.result(20) for call in calls]
    assert {outcome.kind for outcome in outcomes} == {"error"}
    assert all("died" in outcome.message for outcome in outcomes)
    assert max(outcome.ended_at for outcome in outcomes) - killed < 5


def test_a_coordinator_dies_in_a_rolling_restart(ring: FaultyRing) -> None:
    """The one that comes back may have a worker too many; it ends with as many as are wanted."""
    right = ask(ring.base_url, plain(1)).token_ids
    directory = str(ring.pace.directory)
    known = set(processes_of(directory))
    with Client(ring.base_url) as client:
        client.restart("decode")
    wait_until(lambda: bool(set(processes_of(directory)) - known), 15, "a replacement's process")
    os.kill(ring.coordinator_pid(), signal.SIGKILL)
    ring.wait_whole()
    wait_until(lambda: len(processes_of(directory)) == 4, 30, "no process too many")
    assert ring.is_whole()
    assert ask(ring.base_url, plain(1)).token_ids == right
