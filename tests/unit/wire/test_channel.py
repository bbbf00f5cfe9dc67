from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from splitserve.errors import ConfigError
from splitserve.wire import messages as m
from splitserve.wire.channel import (
    COORDINATOR,
    Channel,
    ControlReceived,
    DataReceived,
    FirstTokenSent,
    RoomAvailable,
    SendFailed,
)
from splitserve.wire.codec import decoder_for, encode
from splitserve.wire.curve import make_keys
from tests.unit.wire.channels import (
    HEADER,
    Channels,
    Sink,
    next_event,
    next_events,
    open_channels,
    raw_router,
    raw_socket,
)

ABORT = m.Abort("request", 0, "epoch")
ABORT_ACK = m.AbortAck("request", 0, "epoch")
FAILED = m.Failed("request", 0, "epoch", "decode", "no reason", True)
WELCOME = m.Welcome("epoch")


@pytest.fixture
def channels() -> Iterator[Channels]:
    with open_channels() as channels:
        yield channels


@pytest.mark.parametrize("with_keys", [False, True])
def test_messages_go_both_ways_on_the_data_channel(channels: Channels, with_keys: bool) -> None:
    keys = make_keys() if with_keys else None
    decode, prefill = channels.make(keys, Sink()), channels.make(keys)
    endpoint = decode.bind_data("127.0.0.1")
    sent = [m.Abort("request", attempt, "epoch") for attempt in range(50)]
    for message in sent:
        prefill.send_data(endpoint, message)
    events = next_events(decode, 50)
    assert [e.message for e in events if isinstance(e, DataReceived)] == sent
    peers = {e.peer for e in events if isinstance(e, DataReceived)}
    assert len(peers) == 1
    decode.send_data(peers.pop(), ABORT_ACK)
    assert next_event(prefill, DataReceived) == DataReceived(endpoint, ABORT_ACK, at=0.0)


def test_a_frame_goes_to_the_receiver_and_its_result_to_the_inbox(channels: Channels) -> None:
    decode, prefill = channels.make(receiver=Sink()), channels.make()
    endpoint = decode.bind_data("localhost")
    data = os.urandom(300_000)
    prefill.send_data(endpoint, HEADER, memoryview(data))
    prefill.send_data(endpoint, ABORT)
    frame, abort = next_events(decode, 2)
    assert frame == (HEADER, data)
    assert isinstance(abort, DataReceived)  # in order, though they differ in size


def test_control_messages_go_both_ways(channels: Channels) -> None:
    worker = channels.make()
    with raw_router() as (coordinator, endpoint):
        worker.connect_control(endpoint, b"worker-1")
        worker.send_control(FAILED)
        identity, data = coordinator.recv_multipart()
        assert identity == b"worker-1"
        assert decoder_for(m.ToCoordinator).decode(data) == FAILED
        coordinator.send_multipart([identity, encode(WELCOME)])
        assert next_event(worker, ControlReceived) == ControlReceived(WELCOME, at=0.0)
        coordinator.send_multipart([identity, encode(m.Stop("launch", 1.0))])  # not to a worker
        coordinator.send_multipart([identity, encode(WELCOME)])
        assert next_event(worker, ControlReceived) == ControlReceived(WELCOME, at=0.0)
        assert worker.num_protocol_errors == 1


def test_a_message_tells_how_long_it_lay_here(channels: Channels) -> None:
    """What it says of other times ended when it was made."""
    worker = channels.make()
    started = time.monotonic()
    with raw_router() as (coordinator, endpoint):
        worker.connect_control(endpoint, b"worker-1")
        worker.send_control(m.Tokens("epoch", ()))
        told = decoder_for(m.ToCoordinator).decode(coordinator.recv_multipart()[1])
    assert 0.0 < told.unsent_s < time.monotonic() - started


def test_a_worker_hears_when_its_first_token_left(channels: Channels) -> None:
    worker = channels.make()
    first = m.FirstToken("request", 0, "epoch", (), 0.0, 0.0)
    made = time.monotonic()
    with raw_router() as (coordinator, endpoint):
        worker.connect_control(endpoint, b"worker-1")
        worker.send_control(first)
        coordinator.recv_multipart()
        sent = next_event(worker, FirstTokenSent)
    assert sent.message == first and made < sent.at < time.monotonic()


def test_messages_come_with_the_moment_of_their_arrival(channels: Channels) -> None:
    decode, prefill = channels.make(receiver=Sink()), channels.make()
    sent = time.monotonic()
    prefill.send_data(decode.bind_data("127.0.0.1"), ABORT)
    arrived = next_event(decode, DataReceived)
    assert sent < arrived.at < time.monotonic()


def test_the_launcher_takes_its_own_union(channels: Channels) -> None:
    launcher = channels.make()
    with raw_router() as (coordinator, endpoint):
        launcher.connect_control(endpoint, b"launcher", inbound=m.ToLauncher)
        launcher.send_control(m.ProcessExited("launch", 1, -9, "killed"))
        identity, _ = coordinator.recv_multipart()
        stop = m.Stop("launch", 1.0)
        coordinator.send_multipart([identity, encode(stop)])
        assert next_event(launcher, ControlReceived) == ControlReceived(stop, at=0.0)


@pytest.mark.parametrize("peer", ["00ff", "not hex", "", "tcp://nonsense", "nowhere://1"])
def test_an_unknown_peer_comes_back_as_send_failed(channels: Channels, peer: str) -> None:
    decode = channels.make(receiver=Sink())
    decode.bind_data("127.0.0.1")
    decode.send_data(peer, ABORT_ACK)
    assert next_event(decode, SendFailed) == SendFailed(peer, ABORT_ACK)
    assert decode.staged_bytes(peer) == 0


def test_control_without_a_connection_comes_back_as_send_failed(channels: Channels) -> None:
    worker = channels.make()
    worker.send_control(FAILED)
    assert next_event(worker, SendFailed) == SendFailed(COORDINATOR, FAILED)


def test_an_answer_to_a_peer_that_left_comes_back_as_send_failed(channels: Channels) -> None:
    decode, prefill = channels.make(receiver=Sink()), Channel()
    prefill.send_data(decode.bind_data("127.0.0.1"), ABORT)
    peer = next_event(decode, DataReceived).peer
    prefill.close()
    deadline = time.monotonic() + 5
    failed: list[object] = []
    while not failed and time.monotonic() < deadline:
        decode.send_data(peer, ABORT_ACK)
        failed = decode.receive(0.05)
    assert failed[0] == SendFailed(peer, ABORT_ACK)


def fill(channel: Channel, peer: str, buffer: memoryview) -> int:
    """Send frames for as long as there is room or comes room; how many were taken."""
    num_sent = 0

    def has_room() -> bool:
        return channel.staged_bytes(peer) + buffer.nbytes <= channel.staging_budget_bytes

    while channel.receive(0.3) or has_room():
        while has_room():
            started = time.monotonic()
            channel.send_data(peer, HEADER, buffer)
            assert time.monotonic() - started < 0.5, "send_data blocked"
            num_sent += 1
    return num_sent


def test_a_peer_that_does_not_read_holds_a_bounded_amount(channels: Channels) -> None:
    prefill = channels.make()
    buffer = memoryview(bytes(64 << 10))
    with raw_router(rcvhwm=1, rcvbuf=64 << 10) as (frozen, endpoint):
        num_sent = fill(prefill, endpoint, buffer)
        budget = prefill.staging_budget_bytes
        assert budget - buffer.nbytes < prefill.staged_bytes(endpoint) <= budget
        assert num_sent * buffer.nbytes < 32 << 20  # the rest is in ZeroMQ's and TCP's queues
        prefill.send_data(endpoint, HEADER, buffer)
        assert next_event(prefill, SendFailed) == SendFailed(endpoint, HEADER)
        for _ in range(num_sent):  # it reads again: everything arrives, and there is room
            assert len(frozen.recv_multipart()) == 3
        assert next_event(prefill, RoomAvailable) == RoomAvailable(endpoint)
        assert prefill.staged_bytes(endpoint) == 0


def test_a_frozen_peer_does_not_hold_up_another(channels: Channels) -> None:
    prefill, decode = channels.make(), channels.make(receiver=Sink())
    with raw_router(rcvhwm=1, rcvbuf=64 << 10) as (_, frozen):
        fill(prefill, frozen, memoryview(bytes(64 << 10)))
        prefill.send_data(decode.bind_data("127.0.0.1"), ABORT)
        assert next_event(decode, DataReceived).message == ABORT


def test_a_peer_that_is_not_there_holds_a_bounded_amount(channels: Channels) -> None:
    prefill = channels.make()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
    buffer = memoryview(bytes(64 << 10))
    assert fill(prefill, endpoint, buffer) == prefill.staging_budget_bytes // buffer.nbytes + 8


def test_disconnect_drops_what_waits_and_a_new_send_connects_again(channels: Channels) -> None:
    prefill = channels.make()
    with raw_router(rcvhwm=1, rcvbuf=64 << 10) as (peer, endpoint):
        fill(prefill, endpoint, memoryview(bytes(64 << 10)))
        prefill.disconnect(endpoint)
        prefill.send_data(endpoint, ABORT)
        first = second = peer.recv_multipart()
        while second[1] != encode(ABORT):
            second = peer.recv_multipart()
        assert second[0] != first[0], "the old connection is still in use"
        assert prefill.staged_bytes(endpoint) == 0


def test_what_is_to_be_sent_does_not_wait_for_all_frames_that_have_come(
    channels: Channels,
) -> None:
    """vllm-project/vllm #13816: running streams stood still while KV was received."""

    class Slow:
        num_taken = 0
        has_one, begin = threading.Event(), threading.Event()

        def accept(self, header: m.FrameHeader, data: memoryview) -> object:
            self.has_one.set()
            self.begin.wait(5)
            time.sleep(0.02)  # more than a turn
            self.num_taken += 1
            return header

    slow = Slow()
    decode, prefill = channels.make(receiver=slow), channels.make()
    endpoint = decode.bind_data("127.0.0.1")
    prefill.send_data(endpoint, ABORT)
    peer = next_event(decode, DataReceived).peer
    for _ in range(60):
        prefill.send_data(endpoint, HEADER, memoryview(b"x"))
    assert slow.has_one.wait(5)
    decode.send_data(peer, ABORT_ACK)
    slow.begin.set()
    assert next_event(prefill, DataReceived).message == ABORT_ACK
    assert slow.num_taken < 40, "it came behind the frames"


def test_a_receiver_that_raises_does_not_end_the_thread(channels: Channels) -> None:
    class Broken:
        def accept(self, header: m.FrameHeader, data: memoryview) -> object:
            raise RuntimeError("a bug")

    decode, prefill = channels.make(receiver=Broken()), channels.make()
    endpoint = decode.bind_data("127.0.0.1")
    prefill.send_data(endpoint, HEADER, memoryview(b"x"))
    prefill.send_data(endpoint, ABORT)
    assert next_event(decode, DataReceived).message == ABORT


def test_receive_waits_as_told(channels: Channels) -> None:
    channel = channels.make()
    assert channel.receive(0) == channel.receive(-1.0) == []
    started = time.monotonic()
    assert channel.receive(0.05) == []
    assert time.monotonic() - started >= 0.05
    for number in range(3):
        channel.post(number)
    assert channel.receive(None) == [0, 1, 2]
    channel.post(3)
    assert channel.receive(float("inf")) == [3]


def test_a_signal_handler_may_post_while_receive_waits(channels: Channels) -> None:
    channel = channels.make()
    before = signal.signal(signal.SIGUSR1, lambda *_: channel.post("signal"))
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        assert channel.receive(5) == ["signal"]
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def test_what_was_sent_before_close_still_arrives() -> None:
    with raw_router() as (coordinator, endpoint):
        worker = Channel()
        worker.connect_control(endpoint, b"worker-1")
        for attempt in range(100):
            worker.send_control(m.Failed("r", attempt, "e", "decode", "why", True))
        worker.close()
        for attempt in range(100):
            message = decoder_for(m.ToCoordinator).decode(coordinator.recv_multipart()[1])
            assert message.attempt == attempt


def test_close_does_not_wait_for_a_coordinator_that_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
    worker = Channel(make_keys())
    worker.connect_control(endpoint, b"worker-1")
    worker.send_control(FAILED)
    started = time.monotonic()
    worker.close(linger_s=0.2)
    assert time.monotonic() - started < 1.5
    worker.close()  # and once more does no harm
    assert not [t for t in threading.enumerate() if t.name == "channel"]


def test_an_idle_channel_uses_no_cpu(channels: Channels) -> None:
    decode, prefill = channels.make(receiver=Sink()), channels.make()
    prefill.send_data(decode.bind_data("127.0.0.1"), ABORT)
    next_event(decode, DataReceived)
    used = time.process_time()
    assert decode.receive(0.5) == []
    assert time.process_time() - used < 0.02


def test_only_loopback_is_bound_without_keys(channels: Channels) -> None:
    channel = channels.make(receiver=Sink())
    with pytest.raises(ConfigError, match="off loopback"):
        channel.bind_data("0.0.0.0")
    with pytest.raises(ConfigError, match="can't bind"):
        channels.make(make_keys()).bind_data("203.0.113.7")  # not an address of this machine


def test_a_control_endpoint_that_is_none_is_refused(channels: Channels) -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        channels.make().connect_control("nonsense", b"worker-1")


def test_a_client_without_the_clusters_key_is_not_heard(channels: Channels) -> None:
    ours, theirs = make_keys(), make_keys()
    decode, prefill = channels.make(ours, Sink()), channels.make(ours)
    endpoint = decode.bind_data("127.0.0.1")
    with raw_socket(zmq.DEALER) as plain, raw_socket(zmq.DEALER) as stranger:
        stranger.curve_serverkey = ours.server_public.encode()
        stranger.curve_publickey = theirs.client_public.encode()
        stranger.curve_secretkey = theirs.client_secret.encode()
        for intruder in (plain, stranger):
            intruder.connect(endpoint)
            intruder.send(encode(ABORT))
        assert decode.receive(0.5) == []
    prefill.send_data(endpoint, ABORT)
    assert next_event(decode, DataReceived).message == ABORT
