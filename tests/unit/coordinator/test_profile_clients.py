"""Clients of a profile that do not read, leave at once, come in crowds: each profile ends."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import httpx
import pytest

from coordinator import profiles
from coordinator.http_api import clients
from coordinator.profiles import MAX_PROFILES
from splitserve.wire import messages as m
from tests.unit.coordinator.running import RunningCoordinator, running
from tests.unit.coordinator.scripted_worker import ScriptedWorker
from tests.unit.coordinator.test_profiles import is_over, next_of, observed, orders, profile

NO_LINGER = struct.pack("ii", 1, 0)  # closing is a reset


@pytest.fixture
def own(model: Path) -> Iterator[RunningCoordinator]:
    """A coordinator that a test may stop."""
    with running(model) as coordinator:
        yield coordinator


def ask(coordinator: RunningCoordinator, duration_s: float) -> socket.socket:
    """The connection of a client that has asked for a profile, and reads nothing by itself."""
    url = httpx.URL(coordinator.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect((url.host, url.port))
    content = json.dumps({"duration_s": duration_s}).encode()
    head = f"POST /cluster/profile HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


@contextmanager
def tells_much(worker: ScriptedWorker) -> Iterator[None]:
    """More than sockets hold, again and again."""
    over = threading.Event()
    events = tuple(m.KernelEvent("x" * 200, 0.0, 0.1) for _ in range(1000))

    def tell() -> None:
        while not over.is_set():
            worker.say(observed(worker, kernels=events))
            over.wait(0.05)

    teller = threading.Thread(target=tell)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join(10)


def is_admitted(coordinator: RunningCoordinator) -> bool:
    """Whether there is room for another profile; that one ends at once."""
    body = {"duration_s": 1}
    with coordinator.http.stream("POST", "/cluster/profile", json=body) as response:
        return response.status_code == 200


@pytest.mark.parametrize("num_bytes", [0, 100], ids=["nothing", "a little"])
def test_profiles_of_clients_that_hardly_read_end(
    own: RunningCoordinator, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    """Who reads nothing is gone after a while, and who reads a little has so long for the rest."""
    monkeypatch.setattr(
        *((profiles, "MAX_READ_S") if num_bytes else (clients, "SEND_TIMEOUT_S")), 0.5
    )

    with ExitStack() as stack:
        readers = [stack.enter_context(closing(ask(own, 1.0))) for _ in range(MAX_PROFILES)]
        assert {one.recv(12) for one in readers} == {b"HTTP/1.1 200"}
        assert not is_admitted(own)
        stack.enter_context(tells_much(own.workers[0]))
        deadline = time.monotonic() + 20
        while not is_admitted(own):
            assert time.monotonic() < deadline, "no room"
            for one in readers if num_bytes else ():
                one.recv(num_bytes)


def test_who_leaves_at_once_leaves_nothing_behind(coordinator: RunningCoordinator) -> None:
    for number in range(40):
        connection = ask(coordinator, 600.0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        if number % 2:
            time.sleep(0.001 * (number % 5))
        connection.close()
        coordinator.wait(lambda: is_admitted(coordinator), "room")
    workers = coordinator.workers
    coordinator.wait(lambda: all(map(is_over, workers)), "the end of observing")


def test_of_a_crowd_so_many_are_admitted(own: RunningCoordinator) -> None:
    with ExitStack() as stack:
        crowd = [stack.enter_context(closing(ask(own, 600.0))) for _ in range(8 * MAX_PROFILES)]
        answers = [one.recv(12) for one in crowd]
    assert answers.count(b"HTTP/1.1 200") == MAX_PROFILES
    own.wait(lambda: is_admitted(own), "room")


def test_who_tells_while_nobody_looks_is_told_to_stop(coordinator: RunningCoordinator) -> None:
    """Such as a worker that outlived the coordinator to which a client had come."""
    worker = coordinator.workers[0]
    num_orders = len(orders(worker))
    worker.say(observed(worker, num_lost=1))
    coordinator.wait(lambda: len(orders(worker)) > num_orders, "an order")
    assert orders(worker)[-1] == m.Observe(worker.epoch, 0.0)


def test_a_coordinator_that_stops_says_so_in_the_profile(own: RunningCoordinator) -> None:
    with profile(own, duration_s=600) as lines, closing(ask(own, 600.0)), closing(ask(own, 600.0)):
        next(lines)
        with tells_much(own.workers[0]):
            next_of(lines, "kernels")
            own.stop()
            error = next_of(lines, "error")
    assert "stops" in error["error"]["message"]
