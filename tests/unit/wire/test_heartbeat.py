from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from splitserve.wire import messages as m
from splitserve.wire.codec import decoder_for, encode
from splitserve.wire.heartbeat import SUFFIX, Heartbeat
from tests.unit.wire.channels import raw_router

Router = tuple[zmq.Socket[bytes], str]


@pytest.fixture
def router() -> Iterator[Router]:
    with raw_router() as router:
        yield router


@pytest.fixture
def heartbeat(router: Router) -> Iterator[Heartbeat]:
    heartbeat = Heartbeat(router[1], "worker-1", interval_s=0.1)
    yield heartbeat
    heartbeat.stop()


def next_beat(router: Router) -> m.Heartbeat:
    """Answered, as a coordinator does."""
    identity, data = router[0].recv_multipart()
    assert identity == ("worker-1" + SUFFIX).encode()
    beat = decoder_for(m.ToCoordinator).decode(data)
    assert isinstance(beat, m.Heartbeat)
    router[0].send_multipart([identity, encode(m.HeartbeatAck(beat.epoch))])
    return beat


def until(router: Router, wanted: str, bound: float) -> None:
    """Take beats until a loop's age is 'over' or 'under' the bound."""
    deadline = time.monotonic() + 5
    while (next_beat(router).loop_age_s > bound) != (wanted == "over"):
        assert time.monotonic() < deadline, f"the age never came {wanted} {bound}"


def test_it_beats_every_interval_with_its_epoch(router: Router, heartbeat: Heartbeat) -> None:
    started = time.monotonic()
    heartbeat.start("epoch-1")
    beats = [next_beat(router) for _ in range(5)]
    assert 0.4 <= time.monotonic() - started < 3
    assert {(b.worker_id, b.epoch) for b in beats} == {("worker-1", "epoch-1")}


def test_a_loop_that_does_not_turn_ages_and_one_that_waits_does_not(
    router: Router, heartbeat: Heartbeat
) -> None:
    heartbeat.start("epoch")
    until(router, "over", 0.5)
    heartbeat.publish(m.WorkerStats())
    until(router, "under", 0.4)
    heartbeat.idle(True)
    until(router, "under", 0)
    assert [next_beat(router).loop_age_s for _ in range(4)] == [0, 0, 0, 0]
    heartbeat.idle(False)
    until(router, "over", 0.2)


def test_changed_stats_go_out_at_once_but_not_too_often(router: Router) -> None:
    heartbeat = Heartbeat(router[1], "worker-1", interval_s=60)
    try:
        heartbeat.start("epoch")
        next_beat(router)
        started = time.monotonic()
        heartbeat.publish(m.WorkerStats(num_steps=1))
        assert next_beat(router).stats.num_steps == 1
        assert time.monotonic() - started < 1
        started, num_beats, step = time.monotonic(), 0, 1
        while time.monotonic() - started < 0.4:
            step += 1
            heartbeat.publish(m.WorkerStats(num_steps=step))
            num_beats += router[0].poll(0) and bool(next_beat(router))
        assert 2 <= num_beats <= 9  # one in 50 ms
        while next_beat(router).stats.num_steps != step:  # the last change is not lost
            pass
    finally:
        heartbeat.stop()


def test_it_knows_how_long_the_coordinator_is_silent(router: Router, heartbeat: Heartbeat) -> None:
    heartbeat.start("epoch")
    for _ in range(5):
        next_beat(router)
    assert heartbeat.coordinator_age_s() < 1
    deadline = time.monotonic() + 5
    while heartbeat.coordinator_age_s() < 0.4:  # beats go unanswered
        assert time.monotonic() < deadline
        assert router[0].recv_multipart()
    next_beat(router)
    while heartbeat.coordinator_age_s() > 0.3:
        assert time.monotonic() < deadline
        next_beat(router)


def test_answers_of_another_epoch_or_of_nobody_do_not_count(
    router: Router, heartbeat: Heartbeat
) -> None:
    heartbeat.start("epoch")
    started = time.monotonic()
    while time.monotonic() - started < 0.5:
        identity, _ = router[0].recv_multipart()
        router[0].send_multipart([identity, encode(m.HeartbeatAck("another"))])
        router[0].send_multipart([identity, b"\xc1 noise"])
        router[0].send_multipart([identity, b""])
    assert heartbeat.coordinator_age_s() >= 0.4
    next_beat(router)  # and it still beats


def test_it_goes_on_when_nobody_is_there() -> None:
    heartbeat = Heartbeat("tcp://127.0.0.1:1", "worker-1", interval_s=0.01)
    heartbeat.start("epoch")
    deadline = time.monotonic() + 5
    while heartbeat.coordinator_age_s() < 0.4:
        assert time.monotonic() < deadline
        heartbeat.publish(m.WorkerStats(num_steps=time.monotonic_ns()))
    assert any(t.name == "heartbeat" for t in threading.enumerate())
    started = time.monotonic()
    heartbeat.stop()
    heartbeat.stop()
    assert time.monotonic() - started < 1
    assert not any(t.name == "heartbeat" for t in threading.enumerate())


def test_stop_before_start() -> None:
    heartbeat = Heartbeat("tcp://127.0.0.1:1", "worker-1", interval_s=1)
    heartbeat.stop()
    heartbeat.publish(m.WorkerStats(num_steps=1))


def test_an_orphan_is_told_once(router: Router) -> None:
    orphaned, calls = threading.Event(), []

    def on_orphaned() -> None:
        calls.append(1)
        orphaned.set()

    not_our_parent = os.getpid()
    heartbeat = Heartbeat(router[1], "worker-1", 0.01, None, not_our_parent, on_orphaned)
    heartbeat.start("epoch")
    assert orphaned.wait(5)
    for _ in range(3):
        next_beat(router)
    heartbeat.stop()
    assert len(calls) == 1


def test_a_child_of_its_parent_is_none(router: Router) -> None:
    calls: list[int] = []
    heartbeat = Heartbeat(router[1], "worker-1", 0.01, None, os.getppid(), lambda: calls.append(1))
    heartbeat.start("epoch")
    for _ in range(3):
        next_beat(router)
    heartbeat.stop()
    assert not calls
