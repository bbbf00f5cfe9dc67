"""Channels for tests, closed at the end; and waiting for what comes out of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import zmq

from splitserve.config import CurveKeys
from splitserve.wire.channel import Channel, FrameSink
from splitserve.wire.messages import FrameHeader, Region

E = TypeVar("E")
HEADER = FrameHeader("request", 0, "epoch", Region(0, 1, 0, 1, 0, 1), checksum=1)


class Sink:
    """Returns what it got: the header, and a copy of the buffer."""

    def accept(self, header: FrameHeader, data: memoryview) -> object:
        return header, bytes(data)


class Channels:
    """Makes channels and closes them all."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def make(
        self,
        keys: CurveKeys | None = None,
        receiver: FrameSink | None = None,
        staging_budget_bytes: int = 1 << 20,
    ) -> Channel:
        channel = Channel(keys, receiver, staging_budget_bytes)
        self._stack.callback(channel.close, 0.0)
        return channel


@contextmanager
def open_channels() -> Iterator[Channels]:
    with ExitStack() as stack:
        yield Channels(stack)


@contextmanager
def raw_socket(kind: int, **options: int | bytes) -> Iterator[zmq.Socket[bytes]]:
    """A plain ZeroMQ socket: a peer that needn't keep to the protocol. Its waits end after 5 s."""
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.linger = 0
        socket.rcvtimeo = socket.sndtimeo = 5000
        for name, value in options.items():
            setattr(socket, name, value)
        yield socket


@contextmanager
def raw_router(**options: int | bytes) -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """A bound ROUTER and its endpoint."""
    with raw_socket(zmq.ROUTER, **options) as socket:
        socket.bind("tcp://127.0.0.1:*")
        yield socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)


def next_event(channel: Channel, kind: type[E], timeout_s: float = 5.0) -> E:
    """The next event, which must be of this kind."""
    (event,) = next_events(channel, 1, timeout_s)
    assert isinstance(event, kind), event
    return event


def next_events(channel: Channel, number: int, timeout_s: float = 5.0) -> list[object]:
    """Events until there are `number` of them."""
    deadline = time.monotonic() + timeout_s
    events: list[object] = []
    while len(events) < number:
        left_s = deadline - time.monotonic()
        assert left_s > 0, f"{len(events)} of {number} events came"
        events += channel.receive(left_s)
    assert len(events) == number, events
    return events
