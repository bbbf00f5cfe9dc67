"""Clients that hang up, workers that die, time that runs out: who hears what, and who is freed."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from splitserve.config import Liveness
from splitserve.wire import messages as m
from tests.unit.coordinator.running import RunningCoordinator, running
from tests.unit.coordinator.sse import events_of

Body = dict[str, Any]
LIVENESS = Liveness(heartbeat_interval_s=0.1, heartbeat_timeout_s=1.0)
LONG: Body = {"prompt": "hi", "max_tokens": 400, "stop": "never"}


@pytest.fixture
def own(model: Path) -> Iterator[RunningCoordinator]:
    """A cluster that a test may break."""
    with running(model, request_timeout_s=30.0, liveness=LIVENESS) as coordinator:
        yield coordinator


def in_background(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


def raw_post(coordinator: RunningCoordinator, body: Body) -> socket.socket:
    """A connection with a request on it; closing it is a hang-up."""
    address = httpx.URL(coordinator.url)
    connection = socket.create_connection((address.host, address.port or 80), timeout=10)
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


def in_flight(coordinator: RunningCoordinator) -> tuple[int, int]:
    state = coordinator.cluster()["coordinator"]
    return state["num_requests_in_flight"], state["num_requests_waiting"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_a_hang_up_frees_the_workers_within_a_second(
    coordinator: RunningCoordinator, stream: bool, where: str
) -> None:
    """ggml-org/llama.cpp#24496: generation went on to max_tokens for nobody."""
    script = coordinator.workers[0].script
    script.step_s = 0.02
    if where == "prefill":
        script.hold.set()
    connection = raw_post(coordinator, {**LONG, "stream": stream})
    worker = coordinator.workers[1 if where == "prefill" else 0]
    coordinator.wait(lambda: worker.num_requests == 1, f"the request is at {where}")
    connection.close()
    left_at = time.monotonic()
    coordinator.wait(lambda: worker.num_requests == 0, "the worker is free")
    assert time.monotonic() - left_at < 1.0
    assert in_flight(coordinator) == (0, 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_hang_up_in_the_queue(model: Path, stream: bool) -> None:
    with running(model, num_prefill=0, max_queue=4) as coordinator:
        worker = coordinator.workers[0]
        worker.script.hold.set()
        long = {"prompt": "x" * 400, "max_tokens": 50}  # one of them fills the window
        connections = [raw_post(coordinator, {**long, "stream": stream}) for _ in range(3)]
        coordinator.wait(lambda: in_flight(coordinator) == (1, 2), "two wait")
        for connection in connections[1:]:
            connection.close()
        coordinator.wait(lambda: in_flight(coordinator) == (1, 0), "nobody waits")
        connections[0].close()
        coordinator.check_at_rest()
        assert len(worker.prefills) == 1, "those that left were never sent"


def test_a_full_queue_is_429(model: Path) -> None:
    """llm-d/llm-d-router #2628, ai-dynamo/dynamo PR#10631: a full decode pool is a wait, then 429
    with Retry-After; nobody to decode is something else."""
    with running(model, num_prefill=0, max_queue=1) as coordinator:
        coordinator.workers[0].script.hold.set()
        body = {"prompt": "x" * 400, "max_tokens": 50}
        connections = [raw_post(coordinator, body)]
        coordinator.wait(lambda: in_flight(coordinator) == (1, 0), "one is served")
        connections.append(raw_post(coordinator, body))
        coordinator.wait(lambda: in_flight(coordinator) == (1, 1), "one waits")
        response = coordinator.http.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "overloaded"
        for connection in connections:
            connection.close()
        coordinator.check_at_rest()


@pytest.mark.parametrize("stream", [True, False])
def test_a_failed_request_is_an_http_error(coordinator: RunningCoordinator, stream: bool) -> None:
    """sgl-project/sglang#9726: prefill failed, and the client saw a hang."""
    script = coordinator.workers[0].script
    script.fail = ("prefill", "a fault was injected")
    response = coordinator.http.post("/v1/completions", json={"prompt": "x", "stream": stream})
    assert response.status_code == 500
    error = response.json()["error"]
    assert "a fault was injected" in error["message"] and error["stage"] == "prefill"
    assert error["type"] == "server_error"


def test_a_stream_that_fails_ends_without_its_end_marker(own: RunningCoordinator) -> None:
    """gpustack/gpustack#5939: a cut answer looked whole."""
    own.workers[0].script.step_s = 0.02
    with own.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        own.workers[0].go_silent()
        events = events_of(response)
    assert "[DONE]" not in events
    error = json.loads(events[-1])["error"]
    assert own.workers[0].worker_id in error["message"]
    assert not any(
        choice["finish_reason"] for e in events[:-1] for choice in json.loads(e)["choices"]
    )
    assert own.http.get("/health").status_code == 503
    assert own.http.get("/ready").status_code == 503
    assert own.http.get("/live").status_code == 200
    response = own.http.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 503 and "no decode worker" in response.text


def test_the_only_decode_worker_dies_before_the_first_byte(own: RunningCoordinator) -> None:
    """vllm-project/vllm-ascend#13140: 200 with an empty body."""
    own.workers[1].script.hold.set()
    body = {"prompt": "x", "stream": True}
    thread, results = in_background(lambda: own.http.post("/v1/completions", json=body))
    own.wait(lambda: own.workers[1].num_requests == 1, "the prompt is there")
    own.workers[0].go_silent()
    thread.join(10)
    (response,) = results
    assert response.status_code == 503
    assert own.workers[0].worker_id in response.json()["error"]["message"]
    states = {w["worker_id"]: w["state"] for w in own.cluster()["workers"]}
    assert states[own.workers[0].worker_id] == "dead"


def test_a_prompt_whose_prefill_worker_dies_is_computed_by_the_decode_worker(
    own: RunningCoordinator,
) -> None:
    """llm-d/llm-d-router#2427: a fallback, and the metric says so."""
    own.workers[1].script.hold.set()
    thread, results = in_background(lambda: own.http.post("/v1/completions", json={"prompt": "x"}))
    own.wait(lambda: own.workers[1].num_requests == 1, "the prompt is there")
    own.workers[1].go_silent()
    own.wait(lambda: own.workers[0].num_requests == 1, "the decode worker has it")
    own.workers[0].script.hold.clear()
    thread.join(10)
    assert results[0].status_code == 200
    assert 'splitserve_num_local_prefills_total{model_name="tiny"' in own.http.get("/metrics").text
    assert own.cluster()["coordinator"]["num_local_prefills"] == 1
    assert own.cluster()["coordinator"]["num_restarts"] == 1


@pytest.mark.parametrize("stream", [True, False])
def test_the_deadline(model: Path, stream: bool) -> None:
    with running(model, request_timeout_s=0.5) as coordinator:
        coordinator.workers[0].script.step_s = 0.05
        asked_at = time.monotonic()
        body = {**LONG, "stream": stream}
        if stream:
            with coordinator.http.stream("POST", "/v1/completions", json=body) as response:
                error = json.loads(events_of(response)[-1])["error"]
        else:
            response = coordinator.http.post("/v1/completions", json=body)
            assert response.status_code == 504
            error = response.json()["error"]
        assert 0.4 < time.monotonic() - asked_at < 2.0
        assert error["stage"] == "deadline" and "0.5 s" in error["message"]
        coordinator.check_at_rest()


@pytest.mark.parametrize("stream", [True, False])
def test_shutting_down_tells_those_who_wait(model: Path, stream: bool) -> None:
    with running(model) as coordinator:
        coordinator.workers[0].script.step_s = 0.02
        body = {**LONG, "stream": stream}
        thread, results = in_background(lambda: coordinator.http.post("/v1/completions", json=body))
        coordinator.wait(lambda: coordinator.workers[0].num_tokens_sent > 3, "tokens flow")
        coordinator.stop()
        thread.join(10)
        (response,) = results
        assert response.status_code == (200 if stream else 503)
        assert "shut down" in response.text and "[DONE]" not in response.text


def test_one_prompt_of_several_fails_and_the_others_are_freed(
    coordinator: RunningCoordinator,
) -> None:
    decode, prefill = coordinator.workers
    decode.script.step_s = 0.02
    num_before = len(prefill.prefills)
    body = {**LONG, "prompt": ["a", "b"]}
    thread, results = in_background(lambda: coordinator.http.post("/v1/completions", json=body))
    coordinator.wait(lambda: decode.num_requests == 2, "both are decoded")
    victim = prefill.prefills[num_before].request_id
    decode.say(m.Failed(victim, 0, decode.epoch, "decode", "a fault", False))
    thread.join(10)
    assert results[0].status_code == 500
    coordinator.wait(lambda: len(decode.releases) >= 1, "the other is released")
    decode._running.pop(victim, None)


def test_load_is_nothing_after_a_storm(model: Path) -> None:
    """vllm-project/router#215: load counters leaked with every abort."""
    with running(model, num_prefill=2, num_decode=1) as coordinator:
        coordinator.workers[0].script.step_s = 0.001
        connections = []
        for i in range(60):
            connections.append(raw_post(coordinator, {**LONG, "stream": i % 2 == 0}))
            if i % 3 == 0:
                connections.pop(0).close()
        for connection in connections[::2]:
            connection.close()
        for connection in connections[1::2]:
            connection.settimeout(20)
            assert connection.recv(12) == b"HTTP/1.1 200"
            connection.close()
        coordinator.check_at_rest()
        shares = [len(worker.prefills) for worker in coordinator.workers[1:]]
        assert min(shares) > 0.3 * sum(shares)


def test_a_client_that_reads_slowly_loses_nothing(coordinator: RunningCoordinator) -> None:
    coordinator.workers[0].script.tokens_per_row = 40
    with raw_post(coordinator, {**LONG, "stream": True}) as connection:
        coordinator.wait(lambda: in_flight(coordinator) == (0, 0), "all is computed")
        data = b""
        connection.settimeout(10)
        while b"[DONE]" not in data:
            data += connection.recv(100)
    text = "".join(
        json.loads(line[6:])["choices"][0]["text"]
        for line in data.decode().splitlines()
        if line.startswith("data: {")
    )
    assert text == "abcdefgh" * 50
