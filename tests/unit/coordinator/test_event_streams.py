"""How a stream of events ends: by itself, by its limit, by a failure of whoever makes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from coordinator.http_api.clients import EventStream


class Reading:
    """A client that reads all there is, and how often its stream was closed."""

    def __init__(self) -> None:
        self.body = b""
        self.num_closed = 0

    async def read(
        self, events: Callable[[], AsyncIterator[bytes]], timeout_s: float | None
    ) -> None:
        stream = EventStream(events(), self._close, timeout_s)
        await stream({}, asyncio.Event().wait, self._send)  # type: ignore[arg-type]

    def _close(self) -> None:
        self.num_closed += 1

    async def _send(self, message: Any) -> None:
        self.body += message.get("body", b"")


async def late() -> AsyncIterator[bytes]:
    yield b"first"
    await asyncio.Event().wait()


async def failing() -> AsyncIterator[bytes]:
    yield b"first"
    raise TimeoutError("of something else")


def test_a_stream_is_cut_off_at_its_limit() -> None:
    client = Reading()
    asyncio.run(client.read(late, 0.01))
    assert (client.body, client.num_closed) == (b"first", 1)


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_another_time_out_is_a_failure_that_somebody_hears_of(timeout_s: float | None) -> None:
    client = Reading()
    with pytest.raises(TimeoutError, match="of something else"):
        asyncio.run(client.read(failing, timeout_s))
    assert (client.body, client.num_closed) == (b"first", 1)
