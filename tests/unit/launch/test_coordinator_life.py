"""When a coordinator is judged dead, with time as an argument and no process at all."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from splitserve.config import Promises
from splitserve.errors import LaunchError
from splitserve.launch.child import Exited
from splitserve.launch.coordinator_life import CoordinatorLife
from splitserve.launch.plan import Comeback, WorkerPlace
from splitserve.launch.spawner import COORDINATOR, Inbox, Spawner
from splitserve.settings import resolve
from splitserve.wire import messages as m
from splitserve.wire.codec import decoder_for
from tests.unit.wire.channels import raw_router

INTERVAL_S, TIMEOUT_S = 0.5, 3.0
DEATH = Exited(COORDINATOR, 7, -9, "its last words")


class Recorder(Spawner):
    """Starts nothing, and keeps what it was told about the coordinator."""

    def __init__(self) -> None:
        self.num_kills = 0
        self.comebacks: list[Comeback | None] = []
        self.refuses = False

    def start_coordinator(self, inbox: Inbox, comeback: Comeback | None) -> None:
        self.comebacks.append(comeback)
        if self.refuses:
            raise LaunchError("no processes left")

    def kill_coordinator(self) -> None:
        self.num_kills += 1

    def start(self, place: WorkerPlace, control_endpoint: str) -> None: ...

    def stop(self, launch_id: str, grace_s: float) -> None: ...

    def close(self, grace_s: float) -> None: ...

    def kill_all(self) -> None: ...


@pytest.fixture
def spawner() -> Recorder:
    return Recorder()


@pytest.fixture
def life(spawner: Recorder) -> Iterator[CoordinatorLife]:
    """Of a coordinator that is up and welcomed its launcher, before the cluster is ready."""
    settings = resolve({"model": "fake", "port": 0, "max_restarts": 2}, environ={})
    assert settings.liveness.heartbeat_interval_s == INTERVAL_S
    assert settings.liveness.heartbeat_timeout_s == TIMEOUT_S
    inbox = Inbox()
    life = CoordinatorLife(spawner, inbox, settings, None, "", tuple)
    life.start()
    life.came_up("tcp://127.0.0.1:1")
    life.take(m.Welcome("epoch"))
    yield life
    life.close()
    inbox.close()


PROMISES = Promises(100, 200, 8, 32, 16)


def be_ready(life: CoordinatorLife) -> float:
    life.take(m.Ready("epoch", "http://127.0.0.1:8123", PROMISES))
    return time.monotonic() + 1


def test_silence_for_the_timeout_and_no_less_is_death(
    life: CoordinatorLife, spawner: Recorder
) -> None:
    now = be_ready(life)
    for beat in range(6):
        life.turn(now + beat * INTERVAL_S)
    assert spawner.num_kills == 0
    life.turn(now + TIMEOUT_S - 0.01)  # not due yet
    assert spawner.num_kills == 0
    life.turn(now + TIMEOUT_S)
    assert spawner.num_kills == 1
    assert life.due_at is None  # now its exit is waited for


def test_one_answer_is_life_but_not_one_of_another_epoch(
    life: CoordinatorLife, spawner: Recorder
) -> None:
    now = be_ready(life)
    for beat in range(20):
        life.turn(now + beat * INTERVAL_S)
        if beat % 5 == 4:
            life.take(m.HeartbeatAck("epoch"))
    assert spawner.num_kills == 0
    for beat in range(20, 27):
        life.take(m.HeartbeatAck("another"))
        life.turn(now + beat * INTERVAL_S)
    assert spawner.num_kills == 1


def test_a_pause_of_the_launcher_is_no_silence_of_the_coordinator(
    life: CoordinatorLife, spawner: Recorder
) -> None:
    now = be_ready(life)
    life.turn(now)
    life.turn(now + 1000)
    life.turn(now + 1000 + INTERVAL_S)
    assert spawner.num_kills == 0


def test_before_the_cluster_is_ready_it_may_be_busy_and_its_end_is_final(
    life: CoordinatorLife, spawner: Recorder
) -> None:
    now = time.monotonic() + 1
    for beat in range(50):
        life.turn(now + beat * INTERVAL_S)
    assert spawner.num_kills == 0
    with pytest.raises(LaunchError, match="its last words"):
        life.exited(DEATH)
    assert spawner.comebacks == [None]


def test_it_comes_back_with_its_ports_and_the_last_targets(
    life: CoordinatorLife, spawner: Recorder
) -> None:
    be_ready(life)
    life.take(m.Targets(prefill=0, decode=3))
    life.exited(DEATH)
    assert life.socket is None
    assert not life.send(m.ProcessExited("decode-0", 1, 0, ""))  # nobody is there
    assert life.due_at is not None
    life.turn(life.due_at)
    assert spawner.comebacks[1:] == [Comeback(8123, 1, 0, 3, PROMISES, str(DEATH))]


def test_one_that_never_binds_and_one_that_never_welcomes_are_killed(
    life: CoordinatorLife, spawner: Recorder
) -> None:
    be_ready(life)
    for up in (False, True):
        life.exited(DEATH)
        assert life.due_at is not None
        life.turn(life.due_at)
        if up:
            life.came_up("tcp://127.0.0.1:1")
        killed = spawner.num_kills
        life.turn(life.due_at)
        assert spawner.num_kills == killed + 1


def test_a_start_that_the_system_refuses_counts_as_a_failure(
    life: CoordinatorLife, spawner: Recorder
) -> None:
    be_ready(life)
    spawner.refuses = True
    life.exited(DEATH)
    with pytest.raises(LaunchError, match=r"(?s)ended 3 times.*no processes left.*last words"):
        for _ in range(2):
            assert life.due_at is not None
            life.turn(life.due_at)
    assert len(spawner.comebacks) == 3  # the first one, and two that failed


def test_it_says_hello_again_before_it_takes_the_coordinator_for_dead(
    life: CoordinatorLife,
) -> None:
    """After a pause of the launcher the coordinator may have lost it, and not answer its beats."""
    with raw_router() as (coordinator, endpoint):
        life.came_up(endpoint)
        life.take(m.Welcome("epoch"))
        now = be_ready(life)
        for beat in range(5):
            life.turn(now + beat * INTERVAL_S)
        decoder = decoder_for(m.ToCoordinator)
        said = [type(decoder.decode(coordinator.recv_multipart()[1])) for _ in range(6)]
    assert said == [m.Hello, *[m.Heartbeat] * 3, *[m.Hello] * 2]
