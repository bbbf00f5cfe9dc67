"""Processes: quiet when idle, bound to loopback, and gone when they should be."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import httpx
import pytest

from tests.cluster.harness import ONE_EACH, Ring, ids_of
from tests.waiting import wait_until

CLUSTER = ONE_EACH
FRANCE = "The capital of France is"
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def children_of(pid: int) -> list[int]:
    """Every process below `pid`."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children_of(child)]
    return found


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def listening_addresses(pids: list[int]) -> set[str]:
    """Local addresses of TCP sockets on which these processes listen, from /proc."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                addresses.add(fields[1])
    return addresses


def test_an_idle_cluster_uses_under_two_percent_of_a_core_each(ring: Ring) -> None:
    ring.complete(FRANCE, max_tokens=4)
    ring.assert_drained()
    pids = [int(worker["pid"]) for worker in ring.cluster()["workers"]]
    pids.append(int(ring.cluster()["coordinator"]["pid"]))
    started = time.monotonic()
    before = {pid: cpu_seconds(pid) for pid in pids}
    wait_until(lambda: time.monotonic() - started > 5, 6, "five idle seconds")
    used = {pid: (cpu_seconds(pid) - before[pid]) / 5 for pid in pids}
    assert max(used.values()) < 0.02, used


def test_every_socket_listens_on_loopback(ring: Ring) -> None:
    """InternLM/lmdeploy #4804: sockets bound to every interface."""
    addresses = listening_addresses([os.getpid(), *children_of(os.getpid())])
    assert len(addresses) >= 3  # HTTP, control, data
    assert all(a.startswith("0100007F:") for a in addresses), addresses


def test_no_process_but_the_workers_loads_torch(ring: Ring) -> None:
    pid = int(ring.cluster()["coordinator"]["pid"])
    assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()


def test_health_routes(ring: Ring) -> None:
    for path in ("/live", "/health", "/ready"):
        assert ring.http.get(path).status_code == 200, path


def test_stray_bytes_on_every_port_harm_nobody(ring: Ring, tmp_path: Path) -> None:
    """vllm-project/vllm PR#54757: a port scan killed the listener thread."""
    marker = tmp_path / "marker"
    pickled = f"cposix\nsystem\n(S'touch {marker}'\ntR.".encode()
    http_port = int(ring.base_url.rsplit(":", 1)[1])
    for address in listening_addresses([os.getpid(), *children_of(os.getpid())]):
        port = int(address.split(":")[1], 16)
        if port == http_port:
            continue
        for junk in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(1 << 20), b"", pickled):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as scan:
                try:
                    scan.sendall(junk)
                except OSError:
                    pass  # the other side hung up, as it may
    assert ids_of(ring.complete(FRANCE, max_tokens=2)) == [7042, 30]
    assert not marker.exists()


def serve(model: Path, log: Path | None = None) -> tuple[subprocess.Popen[str], str]:
    """`splitserve serve` in a process of its own, ready; and its URL. `log`: where stderr goes."""
    with open(log or os.devnull, "w", encoding="utf-8") as stderr:
        return _serve(model, stderr)


def _serve(model: Path, stderr: IO[str]) -> tuple[subprocess.Popen[str], str]:
    arguments = ["serve", str(model), "--port", "0", "--dtype", "float32"]
    process = subprocess.Popen(
        [sys.executable, "-m", "splitserve.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "http://127.0.0.1:" in line and "ready" in line.lower():
            port = line.split("http://127.0.0.1:")[1].split()[0].strip("/.,")
            return process, f"http://127.0.0.1:{port}"
    raise AssertionError(f"serve ended with {process.wait(10)} before it was ready")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_serve_ends_nothing_is_left(tiny_model: Path, number: signal.Signals) -> None:
    """ray-project/ray #54364: children lived on after their parent was killed."""
    process, url = serve(tiny_model)
    try:
        assert httpx.get(f"{url}/ready").status_code == 200
        children = children_of(process.pid)
        assert len(children) >= 3
        process.send_signal(number)
        exit_code = process.wait(20)
        wait_until(lambda: not any(map(alive, children)), 5, "children are gone")
        if number != signal.SIGKILL:
            assert exit_code == 0
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_a_stop_is_quick_and_orderly_also_with_work_in_flight(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The coordinator ends requests with its own words; nobody is reported dead on the way."""
    log = tmp_path / "log"
    process, url = serve(tiny_model, log=log)
    try:
        with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=url, timeout=60) as http:
            body = {"prompt": FRANCE, "max_tokens": 2000, "ignore_eos": True}
            answer = pool.submit(http.post, "/v1/completions", json=body)
            wait_until(
                lambda: any(
                    w["num_requests_running"] for w in http.get("/cluster").json()["workers"]
                ),
                30,
                "a running request",
            )
            started = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
            assert time.monotonic() - started < 5
            assert answer.result(5).status_code == 503
            assert "shut down" in answer.result().text
    finally:
        process.kill()
        process.communicate(timeout=10)
    lines = log.read_text().splitlines()
    stopped = [line.split("]")[0].strip("[") for line in lines if line.endswith(": stopped")]
    assert stopped[0] == "coordinator" and sorted(stopped[1:]) == ["decode-0", "prefill-0"]
    assert not [line for line in lines if "is dead" in line]


def test_a_worker_that_cannot_start_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    """exo-explore/exo #1591: a crash in warm-up left the instance 'warming up' for ever."""
    process = subprocess.run(
        [sys.executable, "-m", "splitserve.cli", "serve", str(tmp_path), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode != 0
    assert str(tmp_path) in process.stderr + process.stdout
    assert "Traceback" not in process.stderr
