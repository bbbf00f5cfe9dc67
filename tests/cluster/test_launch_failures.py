"""Where and how clusters are started: side by side, without a network, from a pipe; on any host.

A tiny model, since nothing here depends on what it says.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from splitserve import Client, Cluster
from splitserve.process import available_cores
from tests.cluster.harness import Ring, ids_of, running
from tests.cluster.test_processes import children_of, listening_addresses
from tests.tiny_models import make_tiny_llama
from tests.waiting import wait_until

pytestmark = pytest.mark.breaking

START_S = 60.0
PROMPT = list(range(65, 91))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def shared_ring(model: Path) -> Iterator[Ring]:
    with running(str(model), prefill=1, decode=1, host="localhost") as ring:
        yield ring


def test_one_host_under_several_names_is_one_host(ring: Ring) -> None:
    """sgl-project/sglang PR#5422, ray-project/ray PR#60817: localhost and 127.0.0.1 were two
    workers, of which one got no KV."""
    port = urlsplit(ring.base_url).port
    right = ids_of(ring.complete(PROMPT, max_tokens=8))
    for host in ("localhost", "127.0.0.1"):
        with Client(f"http://{host}:{port}") as client:
            answer = client.generate(PROMPT, max_tokens=8, temperature=0.0, return_token_ids=True)
            assert list(answer.token_ids or ()) == right
            workers = client.cluster()["workers"]
            assert sorted(worker["role"] for worker in workers) == ["decode", "prefill"]
    assert ring.total("decode", "num_kv_bytes_received") > 0
    assert ring.cluster()["coordinator"]["num_local_prefills"] == 0


def test_workers_have_the_threads_and_cores_they_say(ring: Ring) -> None:
    """vllm-project/vllm PR#6109, #43240, #32651: a thread for every core in each worker, or all
    workers on one core."""
    cores = available_cores()
    shares = []
    for worker in ring.cluster()["workers"]:
        pid, num_threads = worker["pid"], worker["num_threads"]
        assert num_threads == max(len(cores) // 2, 1)
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert f"OMP_NUM_THREADS={num_threads}".encode() in environ
        shares.append(os.sched_getaffinity(pid))
    if len(cores) >= 2:
        assert [len(share) for share in shares] == [len(cores) // 2] * 2
        assert not shares[0] & shares[1], "two workers on one core"


def in_a_shell_without_a_network(arguments: list[str]) -> list[str]:
    """Loopback is all there is; as anyone may have it, where the kernel lets anyone."""
    loopback = 'ip link set lo up && "$@"'
    return ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", loopback, "sh", *arguments]


SCRIPT = """
from splitserve import Cluster
cluster = Cluster({model!r}, prefill={prefill}, decode=1, dtype="float32", num_blocks=64)
with cluster:
    answer = cluster.client().generate({prompt!r}, max_tokens=4, temperature=0.0)
    print("answer", answer.text.encode())
"""


def python(way: str, script: str, directory: Path) -> tuple[list[str], str | None]:
    """A command that runs a script, and what it reads from stdin."""
    if way == "-c":
        return [sys.executable, "-c", script], None
    if way == "stdin":
        return [sys.executable, "-"], script
    path = directory / "script.py"
    path.write_text(script)
    return [sys.executable, str(path)], None


def answer_of(command: list[str], stdin: str | None) -> str:
    ran = subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=START_S, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr, ran.stderr
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("answer ")]
    return line


def test_a_cluster_starts_from_anywhere_python_does(model: Path, tmp_path: Path) -> None:
    """vllm-project/vllm #5637, PR#34609: without a main guard a child ran the script again, and
    a process forked behind threads hung.

    Children here are new processes that never see the script.
    """
    script = SCRIPT.format(model=str(model), prompt=PROMPT, prefill=0)
    ways = [python(way, script, tmp_path) for way in ("-c", "stdin", "file")]
    with ThreadPoolExecutor(len(ways)) as pool:
        answers = list(pool.map(lambda way: answer_of(*way), ways))
    assert len(set(answers)) == 1 and len(answers[0]) > len("answer b''")


def test_a_cluster_needs_no_network(model: Path, tmp_path: Path) -> None:
    """ray-project/ray PR#60817: an address found by asking the network was one nobody reached."""
    command, _ = python("-c", SCRIPT.format(model=str(model), prompt=PROMPT, prefill=1), tmp_path)
    probe = in_a_shell_without_a_network(["true"])
    if shutil.which(probe[0]) is None or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("no unshare or no ip here, or not for everyone")
    assert answer_of(in_a_shell_without_a_network(command), None).startswith("answer b")


@contextlib.contextmanager
def side_by_side(model: Path, number: int, pool_size: int) -> Iterator[list[Cluster]]:
    """Clusters with this many workers in each pool, started at the same moment."""
    sizes = {"prefill": pool_size, "decode": pool_size}
    with ThreadPoolExecutor(number) as pool, contextlib.ExitStack() as stack:

        def start(_: int) -> Cluster:
            return Cluster(str(model), **sizes, dtype="float32", num_blocks=64)

        starts = [pool.submit(start, n) for n in range(number)]
        for future in starts:
            stack.callback(close, future)
        yield [future.result(START_S) for future in starts]


def close(start: Future[Cluster]) -> None:
    if start.exception() is None:
        start.result().close()


@pytest.mark.parametrize("pool_size", [2, 1], ids=["first", "again"])
def test_clusters_that_start_at_once_on_one_host_all_come_up(model: Path, pool_size: int) -> None:
    """ray-project/ray #57757, PR#57771, PR#60057, PR#63741: workers looked for a free port, all
    found the same one, and the start failed or never ended."""
    before = listening_addresses(children_of(os.getpid()))
    with side_by_side(model, 2, pool_size) as clusters:
        new = listening_addresses(children_of(os.getpid())) - before
        # HTTP and control of each coordinator, data of each decode worker
        assert len(new) == len(clusters) * (1 + 1 + pool_size)
        for cluster in clusters:
            with httpx.Client(base_url=cluster.base_url, timeout=30) as http:
                serves_on_every_worker(Ring(cluster.base_url, http), 2 * pool_size)


def serves_on_every_worker(ring: Ring, num_workers: int) -> None:
    """Answers come from this cluster's own workers, each of them at work."""

    def all_worked() -> bool:
        ring.complete(PROMPT, max_tokens=4)
        done = {"prefill": "num_tokens_prefilled", "decode": "num_tokens_decoded"}
        return all(worker[done[worker["role"]]] for worker in ring.cluster()["workers"])

    assert len(ring.cluster()["workers"]) == num_workers
    wait_until(all_worked, 10, "work on every worker")
    assert ring.cluster()["coordinator"]["num_restarts"] == 0
