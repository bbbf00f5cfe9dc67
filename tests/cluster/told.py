"""All that a streamed completion tells, put together, so that two of them can be compared."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.cluster.harness import Body

LOGPROB_TOLERANCE = 1e-3


@dataclass(slots=True)
class ToldChoice:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    token_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[str, float]] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, piece: Body) -> None:
        assert self.finish_reason is None, f"{piece} after the end of its choice"
        self.text += piece["text"]
        self.token_ids += piece.get("token_ids") or []
        self.finish_reason = piece["finish_reason"]
        if piece.get("logprobs"):
            self.token_logprobs += piece["logprobs"]["token_logprobs"]
            self.top_logprobs += piece["logprobs"]["top_logprobs"]
            self.text_offset += piece["logprobs"]["text_offset"]

    def difference(self, other: ToldChoice) -> str:
        """Where two answers to one request differ; empty when they don't."""
        for name in ("token_ids", "text", "finish_reason", "text_offset"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {mine!r} and {theirs!r}"
        if self.token_logprobs != pytest.approx(other.token_logprobs, abs=LOGPROB_TOLERANCE):
            return f"token_logprobs: {self.token_logprobs} and {other.token_logprobs}"
        for mine, theirs in zip(self.top_logprobs, other.top_logprobs, strict=True):
            if mine != pytest.approx(theirs, abs=LOGPROB_TOLERANCE):
                return f"top_logprobs: {mine} and {theirs}"
        return ""


@dataclass(slots=True)
class Told:
    """A whole streamed answer, or as much of it as came before it was cut."""

    choices: dict[int, ToldChoice] = field(default_factory=dict)
    usage: Body | None = None
    done: bool = False
    error: str = ""

    def difference(self, other: Told) -> str:
        if (self.done, self.error) != (other.done, other.error):
            return f"done {self.done}, error {self.error!r}; done {other.done}, {other.error!r}"
        if self.usage != other.usage or self.choices.keys() != other.choices.keys():
            return f"usage {self.usage} and {other.usage}"
        found = {i: choice.difference(other.choices[i]) for i, choice in self.choices.items()}
        return "; ".join(f"choice {i}: {text}" for i, text in found.items() if text)

    def take(self, line: str) -> None:
        """One line of the stream."""
        assert not (self.done or self.error), f"{line} after the end"
        if line == "data: [DONE]":
            self.done = True
            return
        event: Any = json.loads(line.removeprefix("data: "))
        self.error = event.get("error", {}).get("message", "")
        self.usage = event.get("usage") or self.usage
        for piece in event.get("choices", ()):
            self.choices.setdefault(piece["index"], ToldChoice()).add(piece)


def tell(base_url: str, body: Body, told: Told | None = None) -> Told:
    """Stream a completion to its end, whatever that is. `told` can be watched meanwhile."""
    told = Told() if told is None else told
    options: Body = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"return_token_ids": True, **options, **body}
    try:
        with (
            httpx.Client(base_url=base_url, timeout=60, verify=False) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            if response.status_code != 200:
                told.error = json.loads(response.read())["error"]["message"]
                return told
            for line in response.iter_lines():
                if line.startswith("data: "):
                    told.take(line)
    except httpx.TransportError as error:
        told.error = f"broken: {error!r}"
    return told
