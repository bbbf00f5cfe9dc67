"""Many Starts at once: each takes its time, and news are heard between them."""

from __future__ import annotations

import time

import zmq

from splitserve.launch.launcher import Launcher
from splitserve.launch.plan import Comeback, WorkerPlace
from splitserve.launch.spawner import CoordinatorUp, Inbox, Spawner
from splitserve.settings import resolve
from splitserve.wire import messages as m
from splitserve.wire.codec import decoder_for, encode
from tests.unit.wire.channels import raw_router

NUM_STARTS = 400
START_S = 0.02


class SlowSpawner(Spawner):
    """Takes its time for each process, and starts none."""

    def __init__(self, endpoint: str) -> None:
        self.started: list[str] = []
        self._endpoint = endpoint

    def start_coordinator(self, inbox: Inbox, comeback: Comeback | None) -> None:
        inbox.post(CoordinatorUp(self._endpoint))

    def start(self, place: WorkerPlace, control_endpoint: str) -> None:
        time.sleep(START_S)
        self.started.append(place.launch_id)

    def kill_coordinator(self) -> None: ...

    def stop(self, launch_id: str, grace_s: float) -> None: ...

    def close(self, grace_s: float) -> None: ...

    def kill_all(self) -> None: ...


def exits(coordinator: zmq.Socket[bytes]) -> list[str]:
    """Of which processes the launcher has said that they ended."""
    said: list[str] = []
    while coordinator.poll(2000) and not said:
        message = decoder_for(m.ToCoordinator).decode(coordinator.recv_multipart()[1])
        said += [message.launch_id] if isinstance(message, m.ProcessExited) else []
    return said


def test_a_number_that_was_a_slip_can_be_taken_back() -> None:
    """Told to start hundreds of workers, a launcher neither heard Stop nor Ctrl-C for minutes."""
    settings = resolve({"model": "fake", "port": 0}, environ={})
    with raw_router() as (coordinator, endpoint):
        spawner = SlowSpawner(endpoint)
        launcher = Launcher(spawner, settings)
        launcher.begin()
        identity, _ = coordinator.recv_multipart()
        coordinator.send_multipart([identity, encode(m.Welcome("epoch"))])
        for number in range(NUM_STARTS):
            coordinator.send_multipart([identity, encode(m.Start(f"decode-{number}", "decode"))])
        last = f"decode-{NUM_STARTS - 1}"
        coordinator.send_multipart([identity, encode(m.Stop(last, 0.0))])
        assert exits(coordinator) == [last], "it was never started, and is told as ended"
        launcher.request_stop()
        assert launcher.wait(NUM_STARTS * START_S / 4), "it went on starting"
        assert len(spawner.started) < NUM_STARTS / 2
