"""A worker's membership through the death of its coordinator, over real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import zmq

from splitserve import membership as membership_module
from splitserve.config import EngineConfig, Fingerprint, KVLayout, Liveness, WorkerConfig
from splitserve.errors import LaunchError, MismatchError
from splitserve.membership import (
    CoordinatorLost,
    EpochChanged,
    Membership,
    TerminationRequested,
)
from splitserve.wire import heartbeat
from splitserve.wire import messages as m
from splitserve.wire.channel import Channel, ControlReceived
from splitserve.wire.codec import decoder_for, encode
from tests.unit.wire.channels import raw_router, raw_socket

FACTS = m.WorkerFacts(
    num_blocks=8,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=128,
    layout=KVLayout("float32", 1, 1, 4, 16),
    fingerprint=Fingerprint("w", "c", "t"),
    num_threads=1,
    device="cpu",
)
HELD = (m.Held("request", 2),)
Router = zmq.Socket[bytes]


@contextmanager
def member(endpoint: str) -> Iterator[Membership]:
    config = WorkerConfig(
        "decode", EngineConfig("fake"), endpoint, "decode-0", liveness=Liveness(0.05, 1.0)
    )
    channel = Channel()
    channel.connect_control(endpoint, b"worker-1")
    membership = Membership(config, channel, "worker-1")
    try:
        yield membership
    finally:
        membership.leave()


@contextmanager
def router_at(endpoint: str) -> Iterator[Router]:
    with raw_socket(zmq.ROUTER) as socket:
        socket.bind(endpoint)
        yield socket


def hear(router: Router, epoch: str, kind: type[Any]) -> Any:
    """The next message of this kind; beats that come before it are answered."""
    decoder = decoder_for(m.ToCoordinator)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        identity, data = router.recv_multipart()
        message = decoder.decode(data)
        if isinstance(message, m.Heartbeat):
            router.send_multipart([identity, encode(m.HeartbeatAck(epoch))])
        if isinstance(message, kind):
            return message
    raise AssertionError(f"no {kind.__name__}")


def say(router: Router, message: m.ToWorker) -> None:
    router.send_multipart([b"worker-1", encode(message)])


def event(membership: Membership, wanted: Callable[[object], bool]) -> object:
    """The next event that is wanted; whatever comes before it is not."""
    deadline = time.monotonic() + 5
    while (left_s := deadline - time.monotonic()) > 0:
        for found in membership.receive(left_s):
            if wanted(found):
                return found
    raise AssertionError("the event did not come")


def join(membership: Membership, router: Router, epoch: str) -> m.Hello:
    """Join, while the test is the coordinator; the Hello that was said."""
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(membership.join, FACTS, ("tcp://127.0.0.1:9",))
        hello = hear(router, epoch, m.Hello)
        say(router, m.Welcome(epoch))
        joined.result(timeout=5)
    assert isinstance(hello, m.Hello)
    return hello


@contextmanager
def orphan() -> Iterator[tuple[Membership, str]]:
    """A member of the epoch "first", whose coordinator has just died, and its endpoint."""
    with ExitStack() as life:
        router, endpoint = life.enter_context(raw_router())
        with member(endpoint) as membership:
            join(membership, router, "first")
            hear(router, "first", m.Heartbeat)
            life.close()
            event(membership, lambda found: found == CoordinatorLost())
            yield membership, endpoint


def test_join_names_the_worker_and_adopts_the_epoch() -> None:
    with raw_router() as (router, endpoint), member(endpoint) as membership:
        hello = join(membership, router, "epoch")
        assert membership.epoch == hear(router, "epoch", m.Heartbeat).epoch == "epoch"
        assert membership.connected
        assert (hello.launch_id, hello.facts, hello.held) == ("decode-0", FACTS, ())
        assert hello.endpoints == ("tcp://127.0.0.1:9",)


def test_worker_joins_the_coordinator_that_took_the_place_of_a_dead_one() -> None:
    """As reported in smg-project/smg#2491: one side restarted, and the other went on with what it
    knew of the old one."""
    with orphan() as (membership, endpoint):
        assert not membership.connected
        died = time.monotonic()
        with router_at(endpoint) as second:
            hear(second, "second", m.Heartbeat)
            event(membership, lambda found: found == EpochChanged("second"))
            assert membership.connected
            assert membership.epoch == "first"  # until it is welcomed
            membership.rejoin(HELD)
            hello = hear(second, "second", m.Hello)
            assert time.monotonic() - died < 2
            assert (hello.held, hello.facts) == (HELD, FACTS)
            assert hello.endpoints == ("tcp://127.0.0.1:9",)
            welcome = m.Welcome("second", keep=HELD)
            say(second, welcome)
            event(membership, lambda found: found == ControlReceived(welcome, at=0.0))
            assert membership.welcomed(welcome)
            assert not membership.welcomed(welcome)  # a second one frees nothing
            assert membership.epoch == "second"
            while hear(second, "second", m.Heartbeat).epoch != "second":
                pass


def test_worker_that_is_not_welcomed_again_is_told_to_say_hello_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat, "REMINDER_S", 0.3)
    with orphan() as (membership, endpoint), router_at(endpoint) as second:
        for _ in range(2):
            news: list[object] = []
            while not news:
                hear(second, "second", m.Heartbeat)
                news = membership.receive(0)
            assert news == [EpochChanged("second")]


def test_worker_that_its_new_coordinator_will_not_have_ends() -> None:
    with orphan() as (membership, endpoint), router_at(endpoint) as second:
        membership.rejoin(())
        hear(second, "second", m.Hello)
        say(second, m.Reject("another model"))
        with pytest.raises(MismatchError, match="refused this worker: another model"):
            event(membership, lambda found: False)


def test_hello_that_died_with_a_coordinator_is_said_again_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership_module, "_HELLO_AGAIN_S", 0.3)
    with ExitStack() as life, ThreadPoolExecutor(1) as pool:
        first, endpoint = life.enter_context(raw_router())
        with member(endpoint) as membership:
            joined = pool.submit(membership.join, FACTS)
            hear(first, "first", m.Hello)
            life.close()
            with router_at(endpoint) as second:
                hear(second, "second", m.Hello)
                say(second, m.Welcome("second"))
                joined.result(timeout=5)
            assert membership.epoch == "second"


@pytest.mark.parametrize("answer", ["refused", "stopped", "silence"])
def test_join_ends_with_an_error_when_there_is_no_welcome(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "WELCOME_TIMEOUT_S", 0.5)
    with raw_router() as (router, endpoint), member(endpoint) as membership:
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(membership.join, FACTS)
            hear(router, "epoch", m.Hello)
            if answer == "refused":
                say(router, m.Reject("too small"))
            if answer == "stopped":
                membership._channel.post(TerminationRequested())
        error = joined.exception()
        expected = {"refused": "too small", "stopped": "stopped before", "silence": "no Welcome"}
        assert isinstance(error, MismatchError if answer == "refused" else LaunchError)
        assert expected[answer] in str(error)


def test_draining_is_told_at_once() -> None:
    with raw_router() as (router, endpoint), member(endpoint) as membership:
        join(membership, router, "epoch")
        assert not hear(router, "epoch", m.Heartbeat).draining
        membership.start_draining()
        while not hear(router, "epoch", m.Heartbeat).draining:
            pass
