"""Clients that hang up: noticed while they wait and while they are streamed to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

# A client that reads nothing for so long is gone: its answer would fill our memory.
SEND_TIMEOUT_S = 60.0

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client hung up; nobody will read an answer."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client hangs up first.

    Raises ClientGoneError then. `receive` must have given the whole body before.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        await _cancel(task, watch)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel what still runs, and wait until it has."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)


class EventStream(Response):
    """Server-sent events. `on_close` is called once, however the stream ends.

    After `timeout_s` it is cut off, however much of it a client has read.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        on_close: Callable[[], None],
        timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        self._events = events
        self._on_close = on_close
        self._timeout_s = timeout_s
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                await unless_gone(receive, self._stream(send))
        except ClientGoneError:
            pass
        except TimeoutError:
            if not limit.expired():  # it is of whoever makes the events, and a failure
                raise
        finally:
            self._on_close()

    async def _stream(self, send: Send) -> None:
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        await _soon(send(start))
        async for events in self._events:
            await _soon(send({"type": "http.response.body", "body": events, "more_body": True}))
        await _soon(send({"type": "http.response.body", "body": b"", "more_body": False}))


class LineStream(EventStream):
    """The same for lines of JSON."""

    media_type = "application/x-ndjson"


async def _soon(sending: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await sending
    except TimeoutError as error:
        raise ClientGoneError from error
    except OSError as error:
        raise ClientGoneError from error
