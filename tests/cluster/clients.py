"""Clients that tell how their request ended, whatever became of the cluster meanwhile."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import socket
import time
from typing import Literal
from urllib.parse import urlsplit

import httpx

from tests.cluster.harness import Body


def prompt(number: int, num_tokens: int = 40) -> list[int]:
    """Letters, another text for each number."""
    letters = random.Random(number)
    return [letters.randrange(32, 127) for _ in range(num_tokens)]


def plain(number: int, **options: object) -> Body:
    return {"prompt": prompt(number), "max_tokens": 40, **options}


def answers(url: str) -> bool:
    """Whether this URL is answered with 200."""
    try:
        return httpx.get(url, timeout=1).status_code == 200
    except httpx.TransportError:
        return False


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended for its client.

    whole: everything came. error: an HTTP error or an error event, with a message. broken: the
    connection ended without an end marker. neat: it ended as if it were whole, and was not.
    """

    kind: Literal["whole", "error", "broken", "neat"]
    ended_at: float
    token_ids: tuple[int, ...] = ()
    message: str = ""
    status: int = 0
    gaps_s: tuple[float, ...] = ()  # between the arrivals of tokens

    def __str__(self) -> str:
        return self.kind if self.kind == "whole" else f"{self.kind}: {self.message}"


def ask(base_url: str, body: Body, timeout_s: float = 60.0) -> Outcome:
    """A completion of token ids on a connection of its own, and how it ended. Never raises."""
    body = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, **body}
    try:
        # No certificates: reading them takes longer than most requests here.
        with httpx.Client(base_url=base_url, timeout=timeout_s, verify=False) as http:
            return _streamed(http, body) if body.get("stream") else _in_one_piece(http, body)
    except httpx.TransportError as error:
        return Outcome("broken", time.monotonic(), message=repr(error))


def _in_one_piece(http: httpx.Client, body: Body) -> Outcome:
    response = http.post("/v1/completions", json=body)
    now = time.monotonic()
    content = response.json()
    if response.status_code != 200:
        return Outcome("error", now, (), content["error"]["message"], response.status_code)
    return Outcome("whole", now, tuple(content["choices"][0]["token_ids"]), status=200)


def _streamed(http: httpx.Client, body: Body) -> Outcome:
    token_ids: list[int] = []
    arrivals: list[float] = []
    done, error, finish = False, "", None
    with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            content = json.loads(response.read())
            message = content["error"]["message"]
            return Outcome("error", time.monotonic(), (), message, response.status_code)
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            assert not (done or error), f"{line} after the end"
            if line == "data: [DONE]":
                done = True
                continue
            event = json.loads(line.removeprefix("data: "))
            error = event.get("error", {}).get("message", "")
            for choice in event.get("choices", ()):
                token_ids += choice.get("token_ids") or []
                finish = choice.get("finish_reason") or finish
            arrivals.append(time.monotonic())
    kind: Literal["whole", "error", "neat"] = "error" if error else "whole"
    if not error and not (done and finish):
        kind, error = "neat", f"done {done}, finish_reason {finish}"
    gaps = tuple(b - a for a, b in itertools.pairwise(arrivals))
    return Outcome(kind, time.monotonic(), tuple(token_ids), error, 200, gaps)


class Abortable:
    """A request on a connection of its own, which may be closed at any moment."""

    def __init__(self, base_url: str, body: Body) -> None:
        address = urlsplit(base_url)
        content = json.dumps(body).encode()
        self._socket = socket.create_connection((address.hostname or "", address.port or 0))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {address.netloc}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        self._socket.sendall(head.encode() + content)

    def abort(self) -> None:
        self._socket.close()
