"""The HTTP application: which route is answered by which function."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from coordinator.http_api import cluster, served
from coordinator.http_api.chat import chat_completions
from coordinator.http_api.clients import ClientGoneError
from coordinator.http_api.completions import completions
from coordinator.http_api.errors import on_bug, on_http_exception, on_splitserve_error
from coordinator.http_api.gate import Gate
from coordinator.service import Service
from splitserve.errors import SplitserveError

Handler = Callable[[Service, Request], Awaitable[Response]]

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/v1/models", served.models),
    ("GET", "/v1/models/{model:path}", served.model),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/tokenize", served.tokenize),
    ("POST", "/detokenize", served.detokenize),
    ("GET", "/live", cluster.live),
    ("GET", "/health", cluster.health),
    ("GET", "/ready", cluster.ready),
    ("GET", "/version", cluster.show_version),
    ("GET", "/metrics", cluster.metrics),
    ("GET", "/cluster", cluster.cluster),
    ("POST", "/cluster/scale", cluster.scale),
    ("POST", "/cluster/restart", cluster.restart),
    ("POST", "/cluster/profile", cluster.profile),
    ("POST", "/reset_prefix_cache", cluster.reset_prefix_cache),
)


def make_app(service: Service) -> ASGIApp:
    """All routes, behind the gate."""
    app = FastAPI(title="splitserve", docs_url=None, redoc_url=None, openapi_url=None)
    for method, path, handler in ROUTES:
        app.add_route(path, _bind(service, handler), methods=[method])
    app.add_exception_handler(SplitserveError, on_splitserve_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(Exception, on_bug)
    return Gate(app, service.config.api_keys)


def _bind(service: Service, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(service, request)
        except ClientGoneError:
            return Response(status_code=499)

    endpoint.__name__ = getattr(handler, "__name__", "endpoint")
    return endpoint
