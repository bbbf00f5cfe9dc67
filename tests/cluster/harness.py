"""Real clusters for tests: started, checked for leaks, stopped; and the words tests use."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from splitserve import Cluster
from tests.waiting import wait_until

TIMEOUT_S = 120.0
DRAIN_S = 5.0

Body = dict[str, Any]
# What most files want, so that they can share it.
ONE_EACH = {
    "prefill": 1,
    "decode": 1,
    "max_num_seqs": 16,
    "served_model_name": ("smol", "smollm2-135m"),
}


@dataclasses.dataclass(frozen=True)
class Ring:
    """A running cluster, spoken to over HTTP."""

    base_url: str
    http: httpx.Client

    def post(self, path: str, body: Body) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt: Any, **options: Any) -> Body:
        """A completion's body; temperature 0 and token ids unless told otherwise."""
        body = {"prompt": prompt, "temperature": 0, "return_token_ids": True, **options}
        return self._send("/v1/completions", body)

    def chat(self, content: str, **options: Any) -> Body:
        messages = [{"role": "user", "content": content}]
        body = {"messages": messages, "temperature": 0, "return_token_ids": True, **options}
        return self._send("/v1/chat/completions", body)

    def cluster(self) -> Body:
        body: Body = self.http.get("/cluster").json()
        return body

    def workers(self, role: str) -> list[Body]:
        return [w for w in self.cluster()["workers"] if w["role"] == role and w["state"] != "dead"]

    def total(self, role: str, field: str) -> int:
        return sum(int(worker[field]) for worker in self.workers(role))

    def at_once(self, calls: Sequence[Callable[[], Body]], concurrency: int = 16) -> list[Body]:
        """Bodies of calls made `concurrency` at a time, in order."""
        with ThreadPoolExecutor(concurrency) as pool:
            return [future.result() for future in [pool.submit(call) for call in calls]]

    def assert_drained(self) -> None:
        """Nothing is held anywhere, and every block is accounted for."""
        wait_until(lambda: not self.leftovers(), DRAIN_S, f"drained; left: {self.leftovers()}")

    def leftovers(self) -> list[str]:
        state = self.cluster()
        left = [
            f"coordinator {name} {state['coordinator'][name]}"
            for name in ("num_requests_in_flight", "num_requests_waiting")
            if state["coordinator"][name] != 0
        ]
        for worker in state["workers"]:
            if worker["state"] == "dead":
                continue
            parts = sum(worker[f"num_blocks_{s}"] for s in ("free", "used", "cached", "reserved"))
            held = {
                name: worker[name]
                for name in (
                    "num_blocks_used",
                    "num_blocks_reserved",
                    "num_requests_running",
                    "num_requests_waiting",
                    "num_transfers_in_flight",
                )
                if worker[name] != 0
            }
            if held or parts != worker["num_blocks_total"]:
                left.append(f"{worker['worker_id']} {held or worker}")
        return left

    def _send(self, path: str, body: Body) -> Body:
        if body.get("stream"):
            return joined(stream(self.http, path, body))
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        result: Body = response.json()
        return result


def stream(http: httpx.Client, path: str, body: Body) -> Iterator[Body]:
    """The events of a streamed answer. AssertionError unless it ends with [DONE]."""
    import json

    with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        done = False
        for line in response.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                assert not done, "an event after [DONE]"
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                yield event
        assert done, "the stream ended without [DONE]"


def joined(events: Iterator[Body]) -> Body:
    """One body made of a stream's events, in the form of an answer that was not streamed."""
    choices: dict[int, Body] = {}
    whole: Body = {}
    for event in events:
        whole.update({k: v for k, v in event.items() if k not in ("choices",) and v is not None})
        for piece in event["choices"]:
            choice = choices.setdefault(
                piece["index"], {"index": piece["index"], "text": "", "token_ids": []}
            )
            text = piece["delta"].get("content") if "delta" in piece else piece["text"]
            choice["text"] += text or ""
            choice["token_ids"] += piece.get("token_ids") or []
            choice["finish_reason"] = piece.get("finish_reason") or choice.get("finish_reason")
            for key in ("prompt_token_ids",):
                if piece.get(key):
                    choice[key] = piece[key]
    return {**whole, "choices": [choices[index] for index in sorted(choices)]}


def ids_of(body: Body, index: int = 0) -> list[int]:
    ids: list[int] = body["choices"][index]["token_ids"]
    return ids


def text_of(body: Body, index: int = 0) -> str:
    choice = body["choices"][index]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


@contextlib.contextmanager
def running(model: str = "smollm2-135m", **flags: Any) -> Iterator[Ring]:
    """A cluster in float32 (unless told otherwise); on exit nothing of it may be left."""
    shared_memory = set(os.listdir("/dev/shm"))
    with Cluster(model, **{"dtype": "float32", **flags}) as cluster:
        limits = httpx.Limits(max_connections=128)
        with httpx.Client(base_url=cluster.base_url, timeout=TIMEOUT_S, limits=limits) as http:
            ring = Ring(cluster.base_url, http)
            pids = [worker["pid"] for worker in ring.cluster()["workers"]]
            yield ring
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists(), f"worker process {pid} is left behind"
    assert_port_free(cluster.base_url)
    assert set(os.listdir("/dev/shm")) <= shared_memory, "shared memory is left behind"


def assert_port_free(base_url: str) -> None:
    address = urlsplit(base_url)
    with socket.socket() as probe:
        in_use = probe.connect_ex((address.hostname, address.port)) == 0
    assert not in_use, f"{base_url} still answers"


def show(config: pytest.Config, title: str, lines: Sequence[str]) -> None:
    """Print a table for whoever reads the output of the tests, captured or not."""
    capture = config.pluginmanager.get_plugin("capturemanager")
    uncaptured = capture.global_and_fixture_disabled() if capture else contextlib.nullcontext()
    with uncaptured:
        print("", title, *lines, sep="\n", flush=True)
