"""Streamed answers, and what both HTTP clients share about their connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

import httpx

from splitserve.answers import Chunk, chunk_from
from splitserve.calls import CONNECT_TIMEOUT_S, Address
from splitserve.errors import (
    RequestFailedError,
    SplitserveError,
    StreamBrokenError,
    UnavailableError,
)
from splitserve.hosts import is_loopback
from splitserve.sse import DONE, EventParser


class Stream:
    """A streamed answer: iterate over its chunks. Closing it early cancels the request.

    Raises StreamBrokenError when it ends without the server's end marker, RequestFailedError when
    the server reports an error.
    """

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._chunks = self._read()

    def _read(self) -> Iterator[Chunk]:
        parser = EventParser()
        try:
            for data in self._response.iter_bytes():
                for event in parser.feed(data):
                    if event == DONE:
                        return
                    yield chunk_from(event)
        except httpx.TransportError as error:
            raise _broken(error) from error
        finally:
            self._response.close()
        raise _broken(None)

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def close(self) -> None:
        self._response.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class AsyncStream:
    """A streamed answer for `async for`. As Stream."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._chunks = self._read()

    async def _read(self) -> AsyncIterator[Chunk]:
        parser = EventParser()
        try:
            async for data in self._response.aiter_bytes():
                for event in parser.feed(data):
                    if event == DONE:
                        return
                    yield chunk_from(event)
        except httpx.TransportError as error:
            raise _broken(error) from error
        finally:
            await self._response.aclose()
        raise _broken(None)

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        return await anext(self._chunks)

    async def aclose(self) -> None:
        await self._response.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()


def http_options(address: Address, timeout_s: float) -> dict[str, Any]:
    """How both clients set httpx up: no limit on connections, one on connecting."""
    return {
        "base_url": address.base_url,
        "headers": address.headers,
        "timeout": httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, pool=None),
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=64),
        "trust_env": not is_loopback(httpx.URL(address.base_url).host),  # no proxy to ourselves
    }


def decoded(response: httpx.Response) -> dict[str, Any]:
    """The JSON of a response. Raises RequestFailedError when it is none."""
    try:
        body = response.json()
    except ValueError as error:
        raise RequestFailedError(f"{response.url} did not answer with JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestFailedError(f"{response.url} did not answer with a JSON object")
    return body


def failure_of(address: Address, error: httpx.TransportError) -> SplitserveError:
    """The exception for a call that got no answer."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return UnavailableError(
            f"can't reach {address.base_url}: {error or 'connecting timed out'}"
        )
    if isinstance(error, httpx.TimeoutException):
        return RequestFailedError(f"no answer from {address.base_url} in time", stage="deadline")
    return RequestFailedError(f"lost the connection to {address.base_url}: {error!r}")


def _broken(error: httpx.TransportError | None) -> StreamBrokenError:
    why = "without the end marker" if error is None else f"by {error!r}"
    return StreamBrokenError(f"the stream was cut {why}; the answer is not complete")
