"""The door of every route: API keys, and the request's id in and out. Plain ASGI."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.http_api.errors import error_response
from splitserve.errors import InvalidRequestError

OPEN_ROUTES = frozenset({"/live", "/health", "/ready"})
MAX_LABEL_CHARS = 200


class Gate:
    """Lets nothing in without a key, when there are keys, but questions after our health.

    It stamps what comes in: from here on a request's time counts.

    A client's x-request-id is a label: it comes back in the answer, and means nothing inside.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})["received_at"] = time.monotonic()
        headers = Headers(scope=scope)
        label = _label(headers.get("x-request-id"))

        async def send_labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = label
            await send(message)

        if self._keys and scope["path"] not in OPEN_ROUTES and not self._admits(headers):
            error = InvalidRequestError("no valid API key", status=401, code="invalid_api_key")
            response = error_response(error)
            response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, send_labelled)
            return
        await self._app(scope, receive, send_labelled)

    def _admits(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        key = given.strip().encode("latin-1")  # the bytes as they came
        # Every key is compared, so that the time tells nothing about which one came close.
        matches = [hmac.compare_digest(key, one) for one in self._keys]
        return any(matches)


def _label(given: str | None) -> str:
    if given and given.isascii() and given.isprintable():
        return given[:MAX_LABEL_CHARS]
    return f"req-{secrets.token_hex(12)}"
