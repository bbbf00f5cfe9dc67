from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from splitserve.config import CurveKeys
from splitserve.wire import heartbeat as heartbeat_module
from splitserve.wire import messages as m
from splitserve.wire.codec import decoder_for, encode
from splitserve.wire.curve import apply_server, authenticate, make_keys
from splitserve.wire.heartbeat import CoordinatorLost, EpochChanged, Heartbeat
from splitserve.wire.parts import HEARTBEAT_SUFFIX
from tests.unit.wire.channels import raw_router, raw_socket
from tests.waiting import wait_until

INTERVAL_S = 0.04
Router = tuple[zmq.Socket[bytes], str]
News = queue.SimpleQueue[object]


@pytest.fixture
def router() -> Iterator[Router]:
    with raw_router() as router:
        yield router


@pytest.fixture
def news() -> News:
    return queue.SimpleQueue()


@pytest.fixture
def heartbeat(router: Router, news: News) -> Iterator[Heartbeat]:
    heartbeat = Heartbeat(router[1], "worker-1", INTERVAL_S, None, news.put)
    yield heartbeat
    heartbeat.stop()


def next_beat(router: Router) -> m.Heartbeat:
    """Answered, as the coordinator that welcomed the worker does."""
    return answer(router, None)


def answer(router: Router, epoch: str | None) -> m.Heartbeat:
    """The next beat, answered by a coordinator of this epoch; None: the beat's."""
    identity, data = router[0].recv_multipart()
    assert identity == b"worker-1" + HEARTBEAT_SUFFIX
    beat = decoder_for(m.ToCoordinator).decode(data)
    assert isinstance(beat, m.Heartbeat)
    router[0].send_multipart([identity, encode(m.HeartbeatAck(epoch or beat.epoch))])
    return beat


def until_epoch(router: Router, epoch: str) -> None:
    """Take beats until one says this epoch, answered by its coordinator."""
    deadline = time.monotonic() + 5
    while answer(router, epoch).epoch != epoch:
        assert time.monotonic() < deadline, f"no beat of {epoch}"


def until(router: Router, wanted: str, bound: float) -> None:
    """Take beats until a loop's age is 'over' or 'under' the bound."""
    deadline = time.monotonic() + 5
    while (next_beat(router).loop_age_s > bound) != (wanted == "over"):
        assert time.monotonic() < deadline, f"the age never came {wanted} {bound}"


def test_it_beats_every_interval_with_its_epoch(router: Router, heartbeat: Heartbeat) -> None:
    started = time.monotonic()
    heartbeat.start("epoch-1")
    beats = [next_beat(router) for _ in range(5)]
    assert 4 * INTERVAL_S <= time.monotonic() - started < 3
    assert {(b.worker_id, b.epoch) for b in beats} == {("worker-1", "epoch-1")}


def test_a_loop_that_does_not_turn_ages_and_one_that_waits_does_not(
    router: Router, heartbeat: Heartbeat
) -> None:
    heartbeat.start("epoch")
    until(router, "over", 0.3)
    heartbeat.publish(m.WorkerStats())
    until(router, "under", 0.25)
    heartbeat.idle(True)
    until(router, "under", 0)
    assert [next_beat(router).loop_age_s for _ in range(4)] == [0, 0, 0, 0]
    heartbeat.idle(False)
    until(router, "over", 0.2)


def test_changed_stats_go_out_at_once_but_not_too_often(router: Router, news: News) -> None:
    heartbeat = Heartbeat(router[1], "worker-1", 60, None, news.put)
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


def test_no_news_while_the_same_coordinator_answers(
    router: Router, heartbeat: Heartbeat, news: News
) -> None:
    heartbeat.start("epoch")
    for _ in range(5):
        next_beat(router)
    assert news.empty()
    assert heartbeat.connected


def test_a_draining_worker_says_so_at_once_and_with_every_beat(router: Router, news: News) -> None:
    heartbeat = Heartbeat(router[1], "worker-1", 60, None, news.put)
    try:
        heartbeat.start("epoch")
        assert not next_beat(router).draining
        started = time.monotonic()
        heartbeat.drain()
        assert next_beat(router).draining
        heartbeat.publish(m.WorkerStats(num_steps=1))
        assert next_beat(router).draining
        assert time.monotonic() - started < 1
    finally:
        heartbeat.stop()


def test_another_epoch_is_told_once_and_not_again_when_it_is_adopted(
    router: Router, heartbeat: Heartbeat, news: News
) -> None:
    heartbeat.start("old")
    answer(router, "old")
    for _ in range(10):
        answer(router, "new")
    assert news.get(timeout=5) == EpochChanged("new")
    assert news.empty()
    heartbeat.adopt("new")
    started = time.monotonic()
    until_epoch(router, "new")
    assert time.monotonic() - started < 1
    for _ in range(5):
        next_beat(router)
    assert news.empty()


def test_epoch_that_is_not_adopted_is_told_again_later_and_a_third_one_after_a_second() -> None:
    news = heartbeat_module._EpochNews()
    assert news.is_due("second", 100)
    assert not news.is_due("second", 101)
    assert not news.is_due("second", 104.9)
    assert news.is_due("second", 105)
    assert not news.is_due("third", 105.9)
    assert news.is_due("third", 106)
    assert not news.is_due("third", 110.9)


def test_noise_for_an_answer_is_dropped(router: Router, heartbeat: Heartbeat, news: News) -> None:
    heartbeat.start("epoch")
    identity, _ = router[0].recv_multipart()
    router[0].send_multipart([identity, b"\xc1 noise"])
    router[0].send_multipart([identity, b""])
    next_beat(router)  # it still beats
    next_beat(router)
    assert news.empty()


def test_loss_of_the_coordinator_is_told_at_once_and_its_successor_hears_a_beat_at_once(
    news: News,
) -> None:
    with raw_router() as first:
        endpoint = first[1]
        heartbeat = Heartbeat(endpoint, "worker-1", 60, None, news.put)
        heartbeat.start("epoch")
        next_beat(first)
    try:
        assert news.get(timeout=1) == CoordinatorLost()
        assert not heartbeat.connected
        with raw_socket(zmq.ROUTER) as second:
            second.bind(endpoint)
            started = time.monotonic()
            assert next_beat((second, endpoint)).epoch == "epoch"
            assert time.monotonic() - started < 2  # the next one by the interval is in a minute
            wait_until(lambda: heartbeat.connected, 5, "connected")
        assert news.get(timeout=1) == CoordinatorLost()
        assert news.empty()
    finally:
        heartbeat.stop()


def test_what_was_not_said_while_nobody_was_there_is_not_said_later(news: News) -> None:
    with raw_router() as first:
        endpoint = first[1]
        heartbeat = Heartbeat(endpoint, "worker-1", 0.01, None, news.put)
        heartbeat.start("epoch")
        next_beat(first)
    try:
        assert news.get(timeout=1) == CoordinatorLost()
        heartbeat.drain()
        wait_until(lambda: not heartbeat._hurry, 5, "beats into the void")
        with raw_socket(zmq.ROUTER) as second:
            second.bind(endpoint)
            assert next_beat((second, endpoint)).draining  # no old beat came first
    finally:
        heartbeat.stop()


def test_it_goes_on_when_nobody_is_there(news: News) -> None:
    heartbeat = Heartbeat("tcp://127.0.0.1:1", "worker-1", 0.01, None, news.put)
    heartbeat.start("epoch")
    assert news.get(timeout=5) == CoordinatorLost()
    for step in range(1000):
        heartbeat.publish(m.WorkerStats(num_steps=step))
    assert any(t.name == "heartbeat" for t in threading.enumerate())
    started = time.monotonic()
    heartbeat.stop()
    heartbeat.stop()
    assert time.monotonic() - started < 1
    assert not any(t.name == "heartbeat" for t in threading.enumerate())
    assert news.empty()


def test_stop_before_start(news: News) -> None:
    heartbeat = Heartbeat("tcp://127.0.0.1:1", "worker-1", 1, None, news.put)
    heartbeat.stop()
    heartbeat.publish(m.WorkerStats(num_steps=1))


@contextmanager
def locked_router(keys: CurveKeys, endpoint: str) -> Iterator[Router]:
    with raw_socket(zmq.ROUTER) as socket:
        authenticator = authenticate(socket.context, keys)
        apply_server(socket, keys)
        socket.bind(endpoint)
        yield socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)
        authenticator.stop()


def test_with_keys_the_loss_and_the_return_are_seen_too(news: News) -> None:
    keys = make_keys()
    with locked_router(keys, "tcp://127.0.0.1:*") as first:
        heartbeat = Heartbeat(first[1], "worker-1", 60, keys, news.put)
        heartbeat.start("epoch")
        next_beat(first)
    try:
        assert news.get(timeout=1) == CoordinatorLost()
        with locked_router(keys, first[1]) as second:
            next_beat(second)
            wait_until(lambda: heartbeat.connected, 5, "connected")
    finally:
        heartbeat.stop()
