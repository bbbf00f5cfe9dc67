"""Workers come and go under steady load, on purpose: no client notices."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from splitserve import Client
from splitserve.config import Role
from tests.cluster.clients import ask
from tests.cluster.faulty import FaultyRing
from tests.cluster.load import Load, Question, questions
from tests.waiting import wait_until

pytestmark = pytest.mark.breaking

FAULTY = {"prefill": 1, "decode": 1}
SIZE = {"prefill": 1, "decode": 2}
NUM_CLIENTS = 4
STEP_S = 0.008  # streams are there all the time, and leave workers that start some CPU


@pytest.fixture(scope="module")
def asked(shared_ring: FaultyRing) -> list[Question]:
    return questions(shared_ring.base_url)


@pytest.fixture
def client(ring: FaultyRing) -> Iterator[Client]:
    with Client(ring.base_url) as client:
        yield client


def num_right(load: Load) -> int:
    assert load.failures() == []
    return load.verdicts["right"]


def wait_served(load: Load, number: int = 30) -> None:
    """Some more answers, so that every size of the cluster has worked."""
    wanted = num_right(load) + number
    wait_until(lambda: num_right(load) >= wanted, 30, f"{number} more answers")


def test_scaling_up_and_down_costs_no_request(
    ring: FaultyRing, client: Client, asked: list[Question]
) -> None:
    """ai-dynamo/dynamo #8534, #9344: late workers got no traffic, leaving ones killed requests."""
    ring.pace.write(decode_step_s=STEP_S)
    with Load(ring.base_url, asked, NUM_CLIENTS) as load:
        wait_served(load)
        for prefill, decode in ((2, 2), (0, 1), (1, 1)):
            client.scale(prefill=prefill, decode=decode)
            ring.wait_whole()
            wait_served(load)
            wait_until(lambda: all_work(ring), 5, "traffic on every worker")
    assert load.failures() == []
    assert [w["state"] for w in ring.cluster()["workers"]] == ["ready"] * 2, "a worker died"


def all_work(ring: FaultyRing) -> bool:
    done = "num_tokens_prefilled", "num_tokens_decoded"
    return all(w[done[w["role"] == "decode"]] > 0 for w in ring.cluster()["workers"])


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_a_rolling_restart_costs_no_request(
    ring: FaultyRing, client: Client, asked: list[Question], pool: Role
) -> None:
    """The replacement of each worker is ready before that one leaves, with exit code 0."""
    client.scale(**SIZE)
    ring.wait_whole()
    ring.pace.write(decode_step_s=STEP_S)
    before = {w["worker_id"] for w in ring.ready(pool)}
    num_ready = []
    with Load(ring.base_url, asked, NUM_CLIENTS) as load:
        assert set(client.restart(pool)["worker_ids"]) == before

        def all_new() -> bool:
            now_ready = {w["worker_id"] for w in ring.ready(pool)}
            num_ready.append(len(now_ready))
            return not before & now_ready

        wait_until(all_new, 60, "a new worker for each")
        ring.wait_whole()
        wait_served(load)
    assert load.failures() == []
    assert min(num_ready) == SIZE[pool], "one left before another was ready"
    assert len(ring.ready(pool)) == SIZE[pool]
    assert not [w for w in ring.cluster()["workers"] if w["state"] == "dead"], "no exit code 0"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_told_to_stop_by_hand_finishes_and_leaves(
    ring: FaultyRing, client: Client, asked: list[Question], role: Role
) -> None:
    """ai-dynamo/dynamo PR#9523, smg-project/smg PR#1172: SIGTERM cut what was in flight."""
    client.scale(**SIZE)
    ring.wait_whole()
    ring.pace.write(decode_step_s=STEP_S)
    worker = ring.ready(role)[0]
    with Load(ring.base_url, asked, NUM_CLIENTS) as load:
        wait_served(load)
        with ThreadPoolExecutor(16) as pool:
            # What arrives before the coordinator knows is turned away by the worker.
            os.kill(worker["pid"], signal.SIGTERM)
            burst = pool.map(lambda one: ask(ring.base_url, one.body), asked[:16])
            assert [outcome.token_ids for outcome in burst] == [one.right for one in asked[:16]]
        wait_until(lambda: not os.path.exists(f"/proc/{worker['pid']}"), 20, "its exit")
        ring.wait_whole()
        wait_served(load)
    assert load.failures() == []
    left = [w for w in ring.cluster()["workers"] if w["worker_id"] == worker["worker_id"]]
    assert left == [], "it did not leave with code 0"
