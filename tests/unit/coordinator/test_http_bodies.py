"""Bodies that are no request at all, and routes that are none."""

from __future__ import annotations

import pytest

from tests.tiny_models import VOCAB_SIZE
from tests.unit.coordinator.refusals import (
    CHAT,
    COMPLETIONS,
    HI,
    Body,
    assert_serves,
    error_of,
    post,
)
from tests.unit.coordinator.running import RunningCoordinator


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{:", 400),
        (b"", 400),
        (b"   ", 400),
        (b"\xff\xfe{}", 400),
        (b'{"prompt": "\xff"}', 400),
        (b"[]", 400),
        (b'"prompt"', 400),
        (b"null", 400),
        (b'{"prompt": "x", "temperature": NaN}', 400),
        (b'{"prompt": "x", "temperature": -Infinity}', 400),
        (b'{"prompt": "x", "temperature": 1e999}', 400),
        (b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}", 400),
        (b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", 400),
        (b'{"a":' * 100 + b"1" + b"}" * 100, 400),
        (b'{"prompt": "' + b"x" * (64 << 20) + b'"}', 413),
    ],
    ids=lambda value: repr(value)[:40],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_bad_bodies(
    coordinator: RunningCoordinator, path: str, content: bytes, status: int
) -> None:
    """agentgateway/agentgateway#2359 and others: bad JSON was a 500, a large body bad JSON."""
    error_of(post(coordinator, path, content), status)
    assert_serves(coordinator)


def test_a_large_body_without_its_length(coordinator: RunningCoordinator) -> None:
    parts = (b"x" * (1 << 20) for _ in range(9))
    headers = {"content-type": "application/json"}
    response = coordinator.http.post(COMPLETIONS, content=parts, headers=headers)
    error_of(response, 413)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "nonsense"])
def test_bad_content_types(coordinator: RunningCoordinator, kind: str) -> None:
    headers = {"content-type": kind}
    response = coordinator.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
    error_of(response, 415)


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "application/vnd.x+json"])
def test_good_content_types(coordinator: RunningCoordinator, kind: str) -> None:
    headers = {"content-type": kind}
    response = coordinator.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 7}),
        ("/tokenize", {"prompt": "\ud83e"}),
        ("/tokenize", {"prompt": "x", "messages": HI}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}),
        ("/detokenize", {"tokens": "abc"}),
        ("/cluster/scale", {}),
        ("/cluster/scale", {"prefill": 1, "decode": 0}),
        ("/cluster/scale", {"prefill": -1, "decode": 1}),
        ("/cluster/scale", {"prefill": 1.5, "decode": 1}),
        ("/cluster/scale", {"prefill": True, "decode": 1}),
    ],
    ids=str,
)
def test_bad_bodies_of_other_routes(coordinator: RunningCoordinator, path: str, body: Body) -> None:
    error_of(post(coordinator, path, body))


def test_unknown_routes_and_methods(coordinator: RunningCoordinator) -> None:
    assert error_of(coordinator.http.get("/nope"), 404)["code"] == "not_found"
    error_of(coordinator.http.get(COMPLETIONS), 405)
    error_of(coordinator.http.get("/docs"), 404)
