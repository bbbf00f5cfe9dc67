"""Profiles while everything breaks: clients, workers, the coordinator. Requests never notice."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from splitserve.calls import address_of
from splitserve.errors import StreamBrokenError
from splitserve.profiling.collected import Collector, Profile
from splitserve.profiling.fetch import profile_stream
from tests.cluster.clients import answers
from tests.cluster.faulty import FaultyRing
from tests.cluster.harness import Body
from tests.cluster.load import Load, questions
from tests.waiting import wait_until

pytestmark = pytest.mark.breaking

FAULTY = {"prefill": 1, "decode": 2}
DURATION_S = 6.0
MAX_GROWTH_BYTES = 100 << 20
DURATIONS: list[Any] = [-1, 0, 0.5, 601, 1e308, "3", True, None, [], {}]
NUMBERS: list[Any] = [-1, 21, 10**30, 1.5, "3", True, None]
MALFORMED: list[Body] = [
    *({"duration_s": value} for value in DURATIONS),
    *({"num_kernel_steps": value} for value in NUMBERS),
]
NOT_JSON = [b"", b"{", b"[]", b"null", b'{"duration_s": NaN}', b'{"duration_s": 1e999}', b"\xff"]


@contextmanager
def observing(ring: FaultyRing, duration_s: float = DURATION_S) -> Iterator[list[Profile]]:
    """A profile around the block, which it holds when it is over."""
    profiles: list[Profile] = []
    collector = Collector()

    def read() -> None:
        with profile_stream(address_of(ring.base_url, None), duration_s, 2) as chunks:
            for chunk in chunks:
                collector.feed(chunk)
        profiles.append(collector.profile())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        wait_until(lambda: collector.num_steps > 0, 10, "the first steps")
        yield profiles
    finally:
        reader.join(duration_s + 10)
        assert not reader.is_alive(), "the profile never ended"


def ask(ring: FaultyRing, content: bytes, claimed: int = 0) -> socket.socket:
    """A connection on which a profile was asked for, by a client that reads nothing by itself."""
    url = urlsplit(ring.base_url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect((url.hostname, url.port))
    head = f"POST /cluster/profile HTTP/1.1\r\nhost: x\r\ncontent-length: {claimed or len(content)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + content)
    return connection


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def bother(ring: FaultyRing, num_readers: int) -> list[socket.socket]:
    """Come in crowds, leave half-way, talk nonsense. Some read a little and stay on the line."""
    body = json.dumps({"duration_s": 600, "num_kernel_steps": 20}).encode()
    stay = [ask(ring, body) for _ in range(12)]
    for number in range(30):
        ask(ring, body[: number % 7], len(body)).close()
        ask(ring, body).close()
    for connection in stay[:num_readers]:
        connection.recv(200)
    for malformed in MALFORMED:
        response = ring.post("/cluster/profile", malformed)
        assert response.status_code == 400, malformed
        assert response.json()["error"]["param"] in malformed
    for content in NOT_JSON:
        with closing(ask(ring, content)) as one:
            assert one.recv(12) == b"HTTP/1.1 400", content
    return stay


def is_admitted(ring: FaultyRing) -> bool:
    """Whether there is room for another profile; that one ends at once."""
    with ring.http.stream("POST", "/cluster/profile", json={"duration_s": 1}) as response:
        return response.status_code == 200


def wait_for_answers(load: Load, number: int) -> None:
    wanted = len(load.asked) + number
    wait_until(lambda: len(load.asked) >= wanted, 60, f"{number} answers")


def test_clients_of_all_kinds_harm_no_request(ring: FaultyRing) -> None:
    asked = questions(ring.base_url, 12)
    pid = ring.coordinator_pid()
    before = resident_bytes(pid)
    with Load(ring.base_url, asked, num_clients=4) as load:
        for num_readers in (12, 8, 0):
            stay = bother(ring, num_readers)
            wait_for_answers(load, 8)
            for connection in stay:
                connection.close()
    assert load.verdicts == {"right": len(load.asked)}, load.failures()
    assert ring.coordinator_pid() == pid
    assert resident_bytes(pid) - before < MAX_GROWTH_BYTES
    wait_until(lambda: is_admitted(ring), 5, "their profiles have ended")
    with Load(ring.base_url, asked, num_clients=1), observing(ring, 1.0) as profiles:
        pass
    assert profiles[0].is_whole


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_worker_that_ends_while_it_is_observed(ring: FaultyRing, blow: signal.Signals) -> None:
    """The profile goes on, and the one that comes in its place is observed too."""
    asked = questions(ring.base_url, 12)
    victim = ring.ready("decode")[0]
    with Load(ring.base_url, asked, num_clients=4) as load:
        with observing(ring, 12.0) as profiles:
            os.kill(victim["pid"], blow)
            wait_until(lambda: victim["worker_id"] not in alive(ring), 30, "it counts as dead")
            ring.wait_whole()
    [profile] = profiles
    assert profile.is_whole and profile.num_unreadable == 0
    assert not load.verdicts.keys() - {"right", "error"}, load.failures()
    workers = {worker.facts.worker_id: worker for worker in profile.workers}
    assert victim["worker_id"] in workers
    newcomers = workers.keys() & alive(ring) - {victim["worker_id"]}
    assert newcomers == alive(ring)
    assert all(len(workers[worker_id].steps) for worker_id in newcomers)


def alive(ring: FaultyRing) -> set[str]:
    return {worker["worker_id"] for worker in ring.cluster_alive()}


def test_a_coordinator_that_dies_cuts_the_profile_and_the_next_one_is_whole(
    ring: FaultyRing,
) -> None:
    asked = questions(ring.base_url, 12)
    pids = {w["pid"] for w in ring.cluster_alive()}
    with Load(ring.base_url, asked, num_clients=2):
        with profile_stream(address_of(ring.base_url, None), 600.0, 20) as chunks:
            next(chunks)
            os.kill(ring.coordinator_pid(), signal.SIGKILL)
            with pytest.raises(StreamBrokenError):
                list(chunks)
        wait_until(lambda: answers(f"{ring.base_url}/live"), 10, "the coordinator at its address")
        ring.wait_whole()
        with observing(ring, 2.0) as profiles:
            pass
    assert profiles[0].is_whole
    assert {w["pid"] for w in ring.cluster_alive()} == pids


@pytest.mark.parametrize("ending", ["Ctrl-C", "the coordinator dies"])
def test_the_command_reports_what_came(ring: FaultyRing, tmp_path: Path, ending: str) -> None:
    asked = questions(ring.base_url, 12)
    trace = tmp_path / "trace.json"
    command = [sys.executable, "-m", "splitserve", "profile", "--base-url", ring.base_url]
    command += ["--duration", "600", "--trace", str(trace), "--kernels", "2"]
    with Load(ring.base_url, asked, num_clients=2) as load:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        wait_for_answers(load, 30)
        if ending == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        else:
            os.kill(ring.coordinator_pid(), signal.SIGKILL)
        output, errors = process.communicate(timeout=60)
        ring.wait_whole()
    assert process.returncode == (0 if ending == "Ctrl-C" else 1), errors
    assert "note: cut short: " in output and "decode-" in output
    assert json.loads(trace.read_text("utf-8"))["traceEvents"]
