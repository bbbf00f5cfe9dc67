"""A request's body: its size, its form, and that it is JSON and nothing else."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from fastapi import Request
from starlette.requests import ClientDisconnect

from coordinator.http_api.clients import ClientGoneError
from splitserve.errors import InvalidRequestError

MAX_BODY_BYTES = 8 << 20
MAX_DISCARDED_BYTES = 128 << 20
READ_TIMEOUT_S = 60.0
MAX_DEPTH = 64
# The parser keeps the interpreter to itself: this much is a tenth of a second.
MAX_COMMAS = 1 << 18
MAX_BRACKETS = 1 << 16  # opening ones: a list or an object costs far more than a number


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object in a request's body. Raises InvalidRequestError (400, 413 or 415)."""
    _check_content_type(request.headers.get("content-type"))
    value = parse(await _read(request))
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return value


def parse(body: bytes) -> Any:
    """Strict JSON: no NaN or Infinity, not nested too deeply, not too many values.

    Raises InvalidRequestError.
    """
    if not body or body.isspace():
        raise InvalidRequestError("the body is empty; a JSON object is expected")
    _check_counts(body)
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not UTF-8: {error.reason}") from error
    except RecursionError as error:
        raise InvalidRequestError("the body's JSON is nested too deeply") from error
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    if _deeper_than(value, MAX_DEPTH):
        raise InvalidRequestError(f"the body's JSON is nested more than {MAX_DEPTH} deep")
    return value


def _check_counts(body: bytes) -> None:
    """How many values there will be, before they are made. Those in texts count too."""
    if body.count(b",") > MAX_COMMAS or body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        raise InvalidRequestError(
            f"the body's JSON has more than {MAX_COMMAS} commas or {MAX_BRACKETS} opening brackets",
            code="body_too_large",
        )


async def _read(request: Request) -> bytes:
    """The body. One that is too large is read on and thrown away for a while, because a client
    that still writes when the connection closes never sees the answer."""
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes <= MAX_BODY_BYTES:
                    parts.append(part)
                elif num_bytes > MAX_DISCARDED_BYTES:
                    break
    except TimeoutError as error:
        raise InvalidRequestError("the body did not come in time", status=408) from error
    except ClientDisconnect as error:
        raise ClientGoneError from error
    if num_bytes > MAX_BODY_BYTES:
        raise InvalidRequestError(
            f"the body is larger than {MAX_BODY_BYTES} bytes", status=413, code="body_too_large"
        )
    return b"".join(parts)


def _check_content_type(content_type: str | None) -> None:
    kind = (content_type or "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise InvalidRequestError(
            f"content-type is {kind[:100]}, application/json is expected", status=415
        )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _deeper_than(value: Any, depth: int) -> bool:
    """Level by level, because it must not recurse itself."""
    level = [value]
    for _ in range(depth):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += [v for v in item.values() if isinstance(v, dict | list)]
            elif isinstance(item, list):
                inner += [v for v in item if isinstance(v, dict | list)]
        if not inner:
            return False
        level = inner
    return True
