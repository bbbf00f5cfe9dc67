"""Reading a streamed answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx

from tests.unit.coordinator.running import RunningCoordinator

Body = dict[str, Any]


@dataclass
class Streamed:
    """All chunks of a stream that ended as it should."""

    chunks: list[Body]

    def parts(self, index: int) -> list[Body]:
        return [c for chunk in self.chunks for c in chunk["choices"] if c["index"] == index]

    def texts(self, index: int) -> list[str]:
        return [
            part["text"] if "text" in part else part["delta"].get("content", "")
            for part in self.parts(index)
        ]

    def text(self, index: int) -> str:
        return "".join(self.texts(index))

    def finish_reasons(self, index: int) -> list[str]:
        parts = self.parts(index)
        assert all(part["finish_reason"] is None for part in parts[:-1])
        return [part["finish_reason"] for part in parts if part["finish_reason"]]

    def token_ids(self, index: int) -> list[int]:
        return [i for part in self.parts(index) for i in part.get("token_ids", [])]

    def logprobs(self, index: int, key: str) -> list[Any]:
        return [x for part in self.parts(index) if part["logprobs"] for x in part["logprobs"][key]]

    def first_roles(self, index: int) -> list[str]:
        deltas = [part.get("delta", {}) for part in self.parts(index)]
        return [delta["role"] for delta in deltas if "role" in delta]

    @property
    def usage(self) -> Body | None:
        found: Body | None = self.chunks[-1].get("usage")
        return found

    @property
    def timing(self) -> Body:
        found: Body = self.chunks[-1]["timing"]
        return found


def streamed(coordinator: RunningCoordinator, path: str, body: Body) -> Streamed:
    with coordinator.http.stream("POST", path, json={**body, "stream": True}) as response:
        return Streamed(chunks_of(response))


def chunks_of(response: httpx.Response) -> list[Body]:
    """Chunks of a stream; AssertionError unless it ends with [DONE]."""
    events = events_of(response)
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def events_of(response: httpx.Response) -> list[str]:
    """The data of every event."""
    assert response.status_code == 200, response.read()
    assert response.headers["content-type"].startswith("text/event-stream")
    return [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
