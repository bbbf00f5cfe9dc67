"""A lean HTTP/1.1 reader of event streams, for measuring: stamps on bytes, parsing left for later.

A general client spends several times more on a chunk, which shows when client and server share
cores. It knows one POST a connection, chunked or not, and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from splitserve.errors import StreamBrokenError, UnavailableError

_LIMIT_BYTES = 1 << 22  # of one line or one chunk


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go: one POST path of one server."""

    host: str
    port: int
    tls: bool
    path: str
    headers: Mapping[str, str]


@dataclass(slots=True)
class RawReply:
    """What came back and when. Stamps are seconds of time.perf_counter."""

    status: int
    sent_at: float
    parts: list[tuple[float, bytes]] = field(default_factory=list)


def target_of(base_url: str, path: str, api_key: str | None) -> Target:
    """The target of `path` on a server given by URL."""
    url = urlsplit(base_url)
    tls = url.scheme == "https"
    headers = {"host": url.netloc, "content-type": "application/json", "connection": "close"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    full_path = url.path.rstrip("/").removesuffix("/v1") + path
    return Target(url.hostname or "", url.port or (443 if tls else 80), tls, full_path, headers)


async def post(target: Target, body: Mapping[str, Any], timeout_s: float) -> RawReply:
    """Send one request and read its whole reply.

    Raises UnavailableError when the server can't be reached, StreamBrokenError when the reply is
    cut or malformed, TimeoutError when it takes longer.
    """
    payload = json.dumps(body).encode()
    sent_at = time.perf_counter()
    async with asyncio.timeout(timeout_s):
        try:
            reader, writer = await asyncio.open_connection(
                target.host,
                target.port,
                limit=_LIMIT_BYTES,
                ssl=ssl.create_default_context() if target.tls else None,
            )
        except OSError as error:
            raise UnavailableError(f"can't reach {target.host}:{target.port}: {error}") from error
        try:
            writer.write(_head(target, len(payload)) + payload)
            return await _read(reader, sent_at)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise StreamBrokenError(f"the reply was cut: {error!r}") from error
        finally:
            writer.close()


def _head(target: Target, num_bytes: int) -> bytes:
    lines = [f"POST {target.path} HTTP/1.1", f"content-length: {num_bytes}"]
    lines += [f"{name}: {value}" for name, value in target.headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _read(reader: asyncio.StreamReader, sent_at: float) -> RawReply:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    reply = RawReply(int(head[0].split()[1]), sent_at)
    headers = {}
    for line in head[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    if headers.get("transfer-encoding", "").lower() == "chunked":
        await _read_chunked(reader, reply)
    elif "content-length" in headers:
        data = await reader.readexactly(int(headers["content-length"]))
        reply.parts.append((time.perf_counter(), data))
    else:
        while data := await reader.read(1 << 16):
            reply.parts.append((time.perf_counter(), data))
    return reply


async def _read_chunked(reader: asyncio.StreamReader, reply: RawReply) -> None:
    while True:
        size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
        data = await reader.readexactly(size + 2)
        if size == 0:
            return
        reply.parts.append((time.perf_counter(), data[:-2]))
