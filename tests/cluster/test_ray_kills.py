"""On a Ray of several nodes: workers come and go on purpose, then they, the coordinator and a
raylet are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from splitserve import Client
from splitserve.config import Role
from splitserve.settings import resolve
from tests.cluster.clients import answers, ask, plain
from tests.cluster.harness import Body
from tests.cluster.load import Load, questions
from tests.tiny_models import make_tiny_llama
from tests.unit.launch.fakes import is_running
from tests.waiting import wait_until

ray = pytest.importorskip("ray")
# What Ray's own sockets and pipes do in this process is not ours to judge.
pytestmark = [
    pytest.mark.breaking,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SETTINGS = {
    "prefill": {"num_workers": 2, "resources": {"prefill": 1}},
    "decode": {"num_workers": 2, "resources": {"decode": 1}},
    "ray": {"name": "kills", "placement_timeout_s": 20},
}
# Ray notices a dead node within about 1.5 s.
QUICK_HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
ENDED_S = 5.0  # from a death to the end of every request it touched
LIVE_S = 15.0  # from a death to a replacement that is ready, on a machine that does nothing else
BUSY_LIVE_S = 30.0  # while all its cores write streams
NUM_STREAMS = 4
NUM_TOKENS = 120
POOLS: tuple[Role, ...] = ("decode", "prefill")


@dataclass(frozen=True)
class RayRing:
    """A cluster of 2 prefill and 2 decode workers, and the Ray it is on."""

    nodes: Any
    base_url: str
    client: Client

    def ready(self, role: Role) -> list[Body]:
        workers: list[Body] = self.client.cluster()["workers"]
        return [w for w in workers if w["role"] == role and w["state"] == "ready"]

    def is_whole(self) -> bool:
        return len(self.ready("prefill")) == len(self.ready("decode")) == 2

    def size(self) -> tuple[int, int]:
        """Ready workers of each pool, when there are no others."""
        alive = [w for w in self.client.cluster()["workers"] if w["state"] != "dead"]
        num_ready = len(self.ready("prefill")), len(self.ready("decode"))
        return num_ready if sum(num_ready) == len(alive) else (-1, -1)

    def worker_ids(self) -> set[str]:
        return {w["worker_id"] for w in self.client.cluster()["workers"]}

    def pids(self) -> set[int]:
        return {worker["pid"] for role in ("prefill", "decode") for worker in self.ready(role)}

    def raylet_of(self, pid: int) -> subprocess.Popen[bytes]:
        """The raylet above a worker's process, through its actor's."""
        raylets = [node.all_processes["raylet"][0].process for node in self.nodes.list_all_nodes()]
        while pid not in (by_pid := {raylet.pid: raylet for raylet in raylets}):
            pid = parent_of(pid)
        found: subprocess.Popen[bytes] = by_pid[pid]
        return found

    def head_raylet(self) -> subprocess.Popen[bytes]:
        found: subprocess.Popen[bytes] = self.nodes.head_node.all_processes["raylet"][0].process
        return found

    def away_from_head(self) -> Body:
        """A decode worker that is not on the head's node."""
        head = self.head_raylet()
        return next(w for w in self.ready("decode") if self.raylet_of(w["pid"]) is not head)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Three nodes with room for one decode worker each, so one of the three is spare."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        for name, value in QUICK_HEALTH_CHECKS.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 3, "resources": {"prefill": 2, "decode": 1}, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            # While there is no other node, this process, and so the launcher, belongs to the head.
            ray.init(cluster.address, namespace="splitserve", logging_level="warning")
            for _ in range(2):
                cluster.add_node(num_cpus=1, resources={"decode": 1})
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def up(nodes: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayRing]:
    from splitserve.launch import ray_cluster

    model = make_tiny_llama(tmp_path_factory.mktemp("tiny") / "model")
    given: dict[str, Any] = {"model": str(model), "port": 0, "dtype": "float32", "num_blocks": 256}
    given |= {"stop_grace_s": 5, "max_restarts": 1}
    settings = resolve(given, file=SETTINGS, environ={})
    base_url = ray_cluster.up(settings)
    with Client(base_url) as client:
        ring = RayRing(nodes, base_url, client)
        yield ring
        pids = ring.pids()
    ray_cluster.down(settings.ray)
    wait_until(lambda: not any(map(is_running, pids)), 5, "end of every worker")


@pytest.fixture
def ring(up: RayRing) -> RayRing:
    wait_until(up.is_whole, 30, "four ready workers")
    return up


def outlive(ring: RayRing, pid: int, worker: Body) -> None:
    """Kill a process that takes this worker along, under steady streams on all of them.

    Every stream ends in time and is right, also those that come until four workers are ready again.
    """
    bodies = [plain(n, max_tokens=NUM_TOKENS, stream=True) for n in range(NUM_STREAMS)]
    before = ring.client.cluster()["coordinator"]["num_restarts"]
    over = threading.Event()
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        right = [one.token_ids for one in pool.map(lambda body: ask(ring.base_url, body), bodies)]

        def keep_asking(number: int) -> float:
            longest_s = 0.0
            while not over.is_set():
                started = time.monotonic()
                outcome = ask(ring.base_url, bodies[number])
                assert (outcome.kind, outcome.token_ids) == ("whole", right[number]), outcome
                longest_s = max(longest_s, outcome.ended_at - started)
            return longest_s

        running = [pool.submit(keep_asking, number) for number in range(NUM_STREAMS)]
        try:
            wait_until(lambda: all_write(ring), 10, "both decode workers have answers to write")
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not ring.is_whole(), 10, "news of a death")
            wait_until(ring.is_whole, BUSY_LIVE_S, "a replacement")
        finally:
            over.set()
        assert max(one.result(30) for one in running) < ENDED_S
    assert ring.client.cluster()["coordinator"]["num_restarts"] > before, "nobody lost a worker"
    assert worker["pid"] not in ring.pids()


def all_write(ring: RayRing) -> bool:
    return all(worker["num_requests_running"] for worker in ring.ready("decode"))


def num_decoded(ring: RayRing) -> int:
    return sum(int(worker["num_tokens_decoded"]) for worker in ring.ready("decode"))


def test_the_launcher_is_on_the_node_it_was_started_from(ring: RayRing) -> None:
    """Its HTTP is on that node's loopback, where `up` was called."""
    raylet = ring.raylet_of(ring.client.cluster()["coordinator"]["pid"])
    assert raylet is ring.head_raylet()


def test_workers_that_come_and_go_on_purpose_cost_no_request(ring: RayRing) -> None:
    """ai-dynamo/dynamo #8534, #9344: late workers got no traffic, leaving ones killed requests."""
    asked = questions(ring.base_url)
    with Load(ring.base_url, asked, NUM_STREAMS) as load:
        for size in ((1, 1), (2, 2), (0, 1), (1, 1), (1, 2)):
            ring.client.scale(prefill=size[0], decode=size[1])
            wait_size(ring, size)
            wait_served(load)
        for pool in POOLS:
            wait_gone(ring, ring.client.restart(pool)["worker_ids"])
            wait_size(ring, (1, 2))
            wait_served(load)
    assert load.failures() == []
    assert not [w for w in ring.client.cluster()["workers"] if w["state"] == "dead"], "a death"
    ring.client.scale(prefill=2, decode=2)


def wait_size(ring: RayRing, size: tuple[int, int]) -> None:
    wait_until(lambda: ring.size() == size, BUSY_LIVE_S, f"{size} workers")


def wait_gone(ring: RayRing, worker_ids: list[str]) -> None:
    gone = set(worker_ids)
    wait_until(lambda: not gone & ring.worker_ids(), 2 * BUSY_LIVE_S, "a new worker for each")


def wait_served(load: Load, number: int = 20) -> None:
    wanted = load.verdicts["right"] + number
    wait_until(lambda: load.verdicts["right"] >= wanted, BUSY_LIVE_S, f"{number} more answers")


def test_a_worker_killed_inside_its_actor_is_replaced_and_not_for_ever(ring: RayRing) -> None:
    """ray-project/ray PR#60145, PR#60088: the engine was dead and its actor alive, so every retry
    went to the same broken actor, without an end."""
    worker, other = ring.ready("prefill")
    right = ask(ring.base_url, plain(1)).token_ids
    os.kill(worker["pid"], signal.SIGKILL)
    died = time.monotonic()
    assert ask(ring.base_url, plain(1)).token_ids == right
    assert time.monotonic() - died < ENDED_S
    wait_until(lambda: ring.is_whole() and worker["pid"] not in ring.pids(), LIVE_S, "another one")
    (again,) = [w for w in ring.ready("prefill") if w["pid"] != other["pid"]]
    os.kill(again["pid"], signal.SIGKILL)  # one restart is allowed here
    wait_until(lambda: bool(ring.client.cluster()["failures"]), 10, "the failure shown")
    wait_until(lambda: ring.client.cluster()["failures"][0]["given_up"], 10, "it is given up")
    assert ask(ring.base_url, plain(1)).token_ids == right
    ring.client.scale(prefill=2, decode=2)  # somebody tries again
    wait_until(ring.is_whole, 30, "another one")


def test_streams_of_a_killed_decode_worker_go_on_at_the_other(ring: RayRing) -> None:
    """ai-dynamo/dynamo PR#7930: after a migration tokens were repeated or lost."""
    away = ring.away_from_head()
    (worker,) = [w for w in ring.ready("decode") if w["pid"] != away["pid"]]
    outlive(ring, worker["pid"], worker)


def test_a_killed_coordinator_is_back_at_its_address_with_its_workers(ring: RayRing) -> None:
    """kvcache-ai/Mooncake #2246: what only the master knew was lost with it."""
    pids = ring.pids()
    right = ask(ring.base_url, plain(1)).token_ids
    with ThreadPoolExecutor(2) as pool:
        cut = pool.submit(ask, ring.base_url, plain(1, max_tokens=400, stream=True))
        before = num_decoded(ring)
        wait_until(lambda: num_decoded(ring) > before + 5, 10, "a stream runs")
        os.kill(ring.client.cluster()["coordinator"]["pid"], signal.SIGKILL)
        died = time.monotonic()
        assert cut.result(30).kind == "broken"
        assert cut.result().ended_at - died < ENDED_S
    wait_until(lambda: answers(f"{ring.base_url}/live"), 10, "the coordinator at its address")
    wait_until(ring.is_whole, 5, "all say Hello again")
    assert ring.pids() == pids
    assert ask(ring.base_url, plain(1)).token_ids == right


def test_a_node_that_is_gone_takes_its_workers_and_no_request(ring: RayRing) -> None:
    """ai-dynamo/dynamo #13088: requests that were on a lost worker never ended.

    The third node has room for a replacement.
    """
    worker = ring.away_from_head()
    raylet = ring.raylet_of(worker["pid"])
    outlive(ring, raylet.pid, worker)
    raylet.wait(10)
    wait_until(lambda: not is_running(worker["pid"]), 10, "the end of who was there")
    assert all(ring.raylet_of(pid).pid != raylet.pid for pid in ring.pids())
