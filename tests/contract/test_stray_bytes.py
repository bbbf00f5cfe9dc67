"""Stray bytes on any socket we open: one line in the log, and the loop serves on.

vllm-project/vllm#54757: a port scan ended the one thread that listened for hand-offs.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgpack
import pytest
import zmq

from splitserve.wire import messages as m
from splitserve.wire.channel import Channel, ControlReceived, DataReceived
from splitserve.wire.codec import encode
from tests.unit.wire.channels import (
    HEADER,
    Sink,
    next_event,
    next_events,
    open_channels,
    raw_router,
    raw_socket,
)

ABORT = m.Abort("request", 0, "epoch")
GRANT = m.Grant("request", 0, "epoch", 0)
WELCOME = m.Welcome("epoch")
GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL".ljust(55, b"\0")  # of ZMTP 3, 64 bytes


class MarkerMaker:
    """Unpickling an instance creates a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (os.mkdir, (str(self._path),))


STREAMS = {
    "an HTTP request": b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
    "an HTTP answer": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "nothing": b"",
    "zeros": bytes(1 << 16),
    "a megabyte of noise": os.urandom(1 << 20),
    "half a greeting": GREETING[:20],
    "a wrong version": b"\xff" + b"\0" * 8 + b"\x7f\x63\x63NULL" + bytes(48),
    "a greeting, then noise": GREETING + os.urandom(5000),
    "a greeting, then a part of 2^40 bytes": GREETING + b"\x06" + struct.pack(">Q", 2**40),
}


def message_parts(marker: Path) -> dict[str, list[bytes]]:
    """Complete ZeroMQ messages that are none of ours."""
    header = encode(HEADER)
    return {
        "one empty part": [b""],
        "two empty parts": [b"", b""],
        "nine parts": [b"x"] * 9,
        "nine messages in one": [encode(ABORT)] * 9,
        "a frame header alone": [header],
        "a frame header and two buffers": [header, b"x", b"y"],
        "a truncated header": [header[:-3], b"x"],
        "a buffer without its header": [os.urandom(4096)],
        "a message with a buffer": [encode(ABORT), b"x"],
        "a megabyte of noise": [os.urandom(1 << 20)],
        "an array of 2^32 items": [b"\xdd\xff\xff\xff\xff"],
        "a length of 2^40": [b"\x94\xa5Abort\xcf" + struct.pack(">Q", 2**40)],
        "a tag that is no UTF-8": [b"\x94\xa5\xff\xfe\xfd\xfc\xfb\xa1r\x00\xa1e"],
        "an id that is no UTF-8": [b"\x94\xa5Abort\xa2\xff\xfe\x00\xa1e"],
        "an unknown message": [msgpack.packb(("Shutdown", "e"))],
        "a message to someone else": [encode(m.Start("launch", "prefill"))],
        "a pickle": [pickle.dumps(MarkerMaker(marker))],
        "a frame header and a pickle": [pickle.dumps(MarkerMaker(marker)), b"x"],
    }


@pytest.fixture
def serving() -> Iterator[tuple[Channel, Channel, str]]:
    """A decode channel, a prefill channel, and the endpoint of the former."""
    with open_channels() as channels:
        decode, prefill = channels.make(receiver=Sink()), channels.make()
        yield decode, prefill, decode.bind_data("127.0.0.1")


def assert_serves(decode: Channel, prefill: Channel, endpoint: str) -> None:
    """A message and a frame go out, an answer comes back."""
    prefill.send_data(endpoint, ABORT)
    prefill.send_data(endpoint, HEADER, memoryview(b"data"))
    received, frame = next_events(decode, 2)
    assert isinstance(received, DataReceived) and received.message == ABORT
    assert frame == (HEADER, b"data")
    decode.send_data(received.peer, GRANT)
    assert next_event(prefill, DataReceived).message == GRANT


@pytest.mark.parametrize("name", STREAMS)
def test_stray_tcp_streams_on_a_bound_socket(
    serving: tuple[Channel, Channel, str], name: str
) -> None:
    decode, prefill, endpoint = serving
    host, _, port = endpoint.removeprefix("tcp://").partition(":")
    with socket.create_connection((host, int(port)), timeout=5) as stray:
        with suppress(OSError):  # hung up on us already: as good
            stray.sendall(STREAMS[name])
        assert_serves(decode, prefill, endpoint)


def test_stray_messages_on_a_bound_socket(
    serving: tuple[Channel, Channel, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decode, prefill, endpoint = serving
    marker = tmp_path / "marker"
    num_sent = 0
    with raw_socket(zmq.DEALER) as stray, caplog.at_level(logging.WARNING):
        stray.connect(endpoint)
        for name, parts in message_parts(marker).items():
            stray.send_multipart(parts)
            stray.send(encode(m.Abort(name, 0, "epoch")))  # comes through behind it
            num_sent += 1
            assert next_event(decode, DataReceived).message == m.Abort(name, 0, "epoch")
            assert decode.num_protocol_errors == num_sent, name
    assert not marker.exists()
    assert len(caplog.records) == 1, "one line, not one for each message"
    assert_serves(decode, prefill, endpoint)


def test_stray_messages_on_the_data_dealer(tmp_path: Path) -> None:
    """From a decode worker that is none."""
    marker = tmp_path / "marker"
    with open_channels() as channels, raw_router() as (stray, endpoint):
        prefill = channels.make()
        prefill.send_data(endpoint, ABORT)
        identity, _ = stray.recv_multipart()
        for num_sent, (name, parts) in enumerate(message_parts(marker).items(), start=1):
            stray.send_multipart([identity, *parts])
            stray.send_multipart([identity, encode(GRANT)])
            assert next_event(prefill, DataReceived).message == GRANT, name
            assert prefill.num_protocol_errors == num_sent, name
    assert not marker.exists()


def test_stray_messages_on_the_control_dealer(tmp_path: Path) -> None:
    """From a coordinator that is none."""
    marker = tmp_path / "marker"
    with open_channels() as channels, raw_router() as (stray, endpoint):
        worker = channels.make()
        worker.connect_control(endpoint, b"worker-1")
        worker.send_control(m.Failed("r", 0, "e", "decode", "why", True))
        identity, _ = stray.recv_multipart()
        for num_sent, (name, parts) in enumerate(message_parts(marker).items(), start=1):
            stray.send_multipart([identity, *parts])
            stray.send_multipart([identity, encode(WELCOME)])
            assert next_event(worker, ControlReceived).message == WELCOME, name
            assert worker.num_protocol_errors == num_sent, name
    assert not marker.exists()


@pytest.mark.parametrize("name", STREAMS)
def test_a_prefill_worker_pointed_at_something_else(name: str) -> None:
    """The other end accepts and then speaks HTTP, noise, or not at all; others are served."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        open_channels() as channels,
    ):
        server.settimeout(5)
        decode, prefill = channels.make(receiver=Sink()), channels.make()
        prefill.send_data(f"tcp://127.0.0.1:{server.getsockname()[1]}", ABORT)
        stray, _ = server.accept()
        with stray:
            with suppress(OSError):  # hung up on us already: as good
                stray.sendall(STREAMS[name])
            assert_serves(decode, prefill, decode.bind_data("127.0.0.1"))


def test_a_part_over_the_limit_is_not_taken_in(serving: tuple[Channel, Channel, str]) -> None:
    decode, prefill, endpoint = serving
    with raw_socket(zmq.DEALER) as stray:
        stray.connect(endpoint)
        stray.send_multipart([encode(HEADER), bytes((64 << 20) + 1)])
        assert_serves(decode, prefill, endpoint)
        assert decode.receive(0.5) == []
