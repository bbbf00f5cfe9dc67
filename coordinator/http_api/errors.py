"""Errors as OpenAI's API writes them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import math
from typing import Any

from fastapi import Request, Response
from starlette.exceptions import HTTPException

from splitserve.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    RequestFailedError,
    SplitserveError,
    UnavailableError,
)

MAX_MESSAGE_CHARS = 1000
RETRY_AFTER_S = 1.0


class JsonResponse(Response):
    """Strict JSON: a NaN or an infinity in it is our own bug."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dump(content)


def dump(content: Any) -> bytes:
    """JSON as bytes. A lone surrogate (only an error can quote one) becomes its escape."""
    text = json.dumps(content, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", errors="backslashreplace")


def error_body(error: Exception) -> dict[str, Any]:
    """What a client reads of an error, in a response or in an event of a stream."""
    status = status_of(error)
    message = str(error) if isinstance(error, SplitserveError) else "internal error"
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + "…"
    body: dict[str, Any] = {
        "message": message,
        "type": _type_of(error, status),
        "param": getattr(error, "param", None),
        "code": _code_of(error, status),
    }
    if isinstance(error, RequestFailedError):
        body["stage"] = error.stage
    return {"error": body}


def error_response(error: Exception) -> JsonResponse:
    headers = {}
    if isinstance(error, OverloadedError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, UnavailableError):
        headers["retry-after"] = str(math.ceil(RETRY_AFTER_S))
    return JsonResponse(error_body(error), status_of(error), headers)


def status_of(error: Exception) -> int:
    """The HTTP status of an error."""
    match error:
        case InvalidRequestError() | RequestFailedError():
            return error.status
        case ModelNotFoundError():
            return 404
        case OverloadedError():
            return 429
        case UnavailableError():
            return 503
        case _:
            return 500


async def on_splitserve_error(_request: Request, error: Exception) -> Response:
    return error_response(error)


async def on_http_exception(_request: Request, error: Exception) -> Response:
    """Unknown routes and methods."""
    assert isinstance(error, HTTPException)
    wrapped = InvalidRequestError(
        f"{error.detail}", status=error.status_code, code=_HTTP_CODES.get(error.status_code)
    )
    response = error_response(wrapped)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def on_bug(_request: Request, error: Exception) -> Response:
    """The traceback goes to the log; the client learns only that it was not its fault."""
    return error_response(error)


_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


def _type_of(error: Exception, status: int) -> str:
    if status == 401:
        return "authentication_error"
    if isinstance(error, OverloadedError):
        return "rate_limit_error"
    if isinstance(error, UnavailableError):
        return "service_unavailable_error"
    return "invalid_request_error" if status < 500 else "server_error"


def _code_of(error: Exception, status: int) -> str | None:
    if isinstance(error, ModelNotFoundError):
        return "model_not_found"
    if isinstance(error, OverloadedError):
        return "overloaded"
    if isinstance(error, RequestFailedError):
        return "deadline_exceeded" if status == 504 else "request_failed"
    code = getattr(error, "code", None)
    return code if isinstance(code, str) else None
