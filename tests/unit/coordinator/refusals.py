"""Sending what should be refused, and what a refusal must look like."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.unit.coordinator.running import RunningCoordinator

Body = dict[str, Any]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


def post(coordinator: RunningCoordinator, path: str, body: Any) -> httpx.Response:
    """Sent as Python writes it, NaN and all."""
    content = body if isinstance(body, bytes | str) else json.dumps(body)
    headers = {"content-type": "application/json"}
    return coordinator.http.post(path, content=content, headers=headers)


def error_of(response: httpx.Response, status: int = 400) -> Body:
    """The error of a refused request; AssertionError when it isn't as it should be."""
    assert response.status_code == status, response.text
    assert len(response.content) < 10_000
    error: Body = json.loads(response.text, parse_constant=pytest.fail)["error"]
    assert set(error) >= {"message", "type", "param", "code"} and error["message"]
    return error


def assert_serves(coordinator: RunningCoordinator) -> None:
    response = coordinator.http.post(COMPLETIONS, json={"prompt": "hi", "max_tokens": 3})
    assert response.json()["choices"][0]["text"] == "abc"
