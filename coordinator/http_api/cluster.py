"""Routes about the cluster: its state, its size, its health."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import Request, Response

from coordinator.http_api.body import read_object
from coordinator.http_api.clients import LineStream
from coordinator.http_api.errors import JsonResponse, dump
from coordinator.http_api.schemas import ProfileBody, RestartBody, ScaleBody, validate
from coordinator.service import Service
from splitserve.metrics import CONTENT_TYPE


async def live(_service: Service, _request: Request) -> Response:
    return JsonResponse({"status": "live"})


async def health(service: Service, _request: Request) -> Response:
    return _status(service.healthy, "healthy", "no decode worker is ready, or the loop is stuck")


async def ready(service: Service, _request: Request) -> Response:
    return _status(service.ready, "ready", "not every worker is ready")


def _status(good: bool, word: str, otherwise: str) -> Response:
    return JsonResponse({"status": word if good else otherwise}, 200 if good else 503)


async def cluster(service: Service, _request: Request) -> Response:
    return JsonResponse(service.cluster())


async def scale(service: Service, request: Request) -> Response:
    body = validate(ScaleBody, await read_object(request))
    target = service.scale(body.prefill, body.decode)
    return JsonResponse({"target": target}, 202)


async def restart(service: Service, request: Request) -> Response:
    body = validate(RestartBody, await read_object(request))
    return JsonResponse({"worker_ids": service.restart(body.pool)}, 202)


async def profile(service: Service, request: Request) -> Response:
    """What every worker does from now on, as it happens: NDJSON."""
    body = validate(ProfileBody, await read_object(request))
    running = service.profile(body.duration_s, body.num_kernel_steps)
    return LineStream(
        _ndjson(service.profile_lines(running)),
        on_close=lambda: service.end_profile(running),
        timeout_s=running.longest_s,
    )


async def _ndjson(lines: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    async for line in lines:
        yield dump(line) + b"\n"


async def reset_prefix_cache(service: Service, _request: Request) -> Response:
    """Prompts sent from now on find nothing cached."""
    return JsonResponse({"worker_ids": service.reset_prefix_cache()})


async def metrics(service: Service, _request: Request) -> Response:
    return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})


async def show_version(_service: Service, _request: Request) -> Response:
    try:
        number = version("splitserve")
    except PackageNotFoundError:  # run from a source tree that isn't installed
        number = "unknown"
    return JsonResponse({"version": number})
