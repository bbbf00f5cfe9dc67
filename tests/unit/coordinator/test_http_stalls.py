"""One request with far too much in it must not hold everybody else up."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.unit.coordinator.refusals import CHAT, COMPLETIONS, assert_serves, error_of, post
from tests.unit.coordinator.running import RunningCoordinator

MAX_STALL_S = 0.5  # without the limits it was seconds
LIMITS = ("limit is", "more than")
LARGE: list[tuple[str, Any]] = [
    (COMPLETIONS, {"prompt": [1] * 2_500_000}),
    (COMPLETIONS, {"prompt": [1] * 200_000}),
    (COMPLETIONS, {"prompt": [[]] * 1_900_000}),
    (COMPLETIONS, {"prompt": [[]] * 60_000}),
    (COMPLETIONS, {"prompt": [[1] * 100_000] * 2}),
    (COMPLETIONS, {"prompt": ["x " * 100_000] * 20}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}] * 60_000}),
    (CHAT, {"messages": [{"role": "user", "content": "a b " * 600_000}]}),
    ("/tokenize", {"prompt": "a b " * 786_000}),
    ("/tokenize", {"prompt": "a b " * 160_000}),
    ("/detokenize", {"tokens": [1] * 1_570_000}),
    ("/detokenize", {"tokens": [1] * 200_000}),
]


@contextmanager
def watched(loop: asyncio.AbstractEventLoop, gaps: list[float]) -> Iterator[None]:
    """The longest time the loop did not turn goes into `gaps`."""
    ended = threading.Event()

    async def tick() -> float:
        longest, last = 0.0, time.monotonic()
        while not ended.is_set():
            await asyncio.sleep(0.002)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        return longest

    ticking = asyncio.run_coroutine_threadsafe(tick(), loop)
    try:
        yield
    finally:
        ended.set()
        gaps.append(ticking.result(30))


@pytest.mark.parametrize(("path", "body"), LARGE, ids=lambda value: repr(value)[:40])
def test_too_much_is_refused_before_it_is_looked_at(
    coordinator: RunningCoordinator, path: str, body: Any
) -> None:
    content = json.dumps(body, separators=(",", ":"))
    gaps: list[float] = []
    with watched(coordinator._loop, gaps):
        error = error_of(post(coordinator, path, content))
    assert any(word in error["message"] for word in LIMITS), error["message"]
    assert max(gaps) < MAX_STALL_S
    assert_serves(coordinator)


def test_the_largest_that_is_served(coordinator: RunningCoordinator) -> None:
    longest = coordinator.http.post("/tokenize", json={"prompt": "a" * 512 * 32})
    assert longest.json()["count"] == 512 * 32
    error_of(post(coordinator, "/tokenize", {"prompt": "a" * (512 * 32 + 1)}))
    assert coordinator.http.post("/detokenize", json={"tokens": [97] * 512}).status_code == 200
    error = error_of(post(coordinator, "/detokenize", {"tokens": [97] * 513}))
    assert error["message"] == "513 tokens, the limit is 512"
