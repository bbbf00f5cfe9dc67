"""The cluster's own routes, keys, the launcher's part, and strangers at the control socket."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.http_api.app import ROUTES
from coordinator.http_server import on_loop_error
from coordinator.server import Server
from splitserve.config import CoordinatorConfig, Fingerprint
from splitserve.errors import ConfigError
from tests.unit.coordinator.running import RunningCoordinator, running
from tests.unit.coordinator.scripted_worker import ScriptedWorker, facts

WORKER_FIELDS = {
    "worker_id", "role", "state", "pid", "host", "num_blocks_total", "num_blocks_free",
    "num_blocks_used", "num_blocks_cached", "num_blocks_reserved", "num_blocks_quarantined",
    "num_requests_running", "num_requests_waiting", "num_transfers_in_flight",
    "num_tokens_prefilled", "num_tokens_decoded", "num_kv_bytes_sent", "num_kv_bytes_received",
}  # fmt: skip


def test_the_state_of_the_cluster(coordinator: RunningCoordinator) -> None:
    body = coordinator.cluster()
    assert body["model"] == "tiny" and body["target"] == {"prefill": 1, "decode": 1}
    assert body["coordinator"]["epoch"] and body["coordinator"]["num_requests_in_flight"] == 0
    assert {w["role"] for w in body["workers"]} == {"prefill", "decode"}
    for worker in body["workers"]:
        assert set(worker) >= WORKER_FIELDS
        assert worker["state"] == "ready" and worker["pid"] == 4242
        assert worker["num_blocks_total"] == 64


def test_small_answers_do_not_wait_for_acknowledgements(coordinator: RunningCoordinator) -> None:
    """On a connection that is kept, each cost 40 ms more than it had to."""
    coordinator.http.get("/live")
    server = coordinator.server._http
    assert server is not None
    sockets = [c.transport.get_extra_info("socket") for c in server.server_state.connections]
    assert sockets
    assert all(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in sockets)


def test_before_it_is_ready(empty: RunningCoordinator) -> None:
    def statuses() -> list[int]:
        return [empty.http.get(path).status_code for path in ("/live", "/health", "/ready")]

    assert statuses() == [200, 503, 503]
    response = empty.http.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 503 and "retry-after" in response.headers
    assert "0 of 1 prefill" in response.text
    empty.add("decode")
    empty.wait(lambda: statuses() == [200, 200, 503], "a decode worker is enough for health")
    empty.add("prefill")
    empty.wait(lambda: statuses() == [200, 200, 200], "all are there")


def test_a_rolling_restart_is_asked_for_by_pool(coordinator: RunningCoordinator) -> None:
    response = coordinator.http.post("/cluster/restart", json={"pool": "all"})
    assert response.status_code == 400 and response.json()["error"]["param"] == "pool"
    response = coordinator.http.post("/cluster/restart", json={"pool": "prefill"})
    (worker_id,) = [w["worker_id"] for w in coordinator.cluster()["workers"] if "p" in w["role"]]
    assert response.status_code == 202 and response.json() == {"worker_ids": [worker_id]}
    assert coordinator.cluster()["failures"] == []


def test_a_stuck_loop_is_not_healthy(coordinator: RunningCoordinator) -> None:
    """vllm-project/vllm#39863: health said 200 while the engine was wedged."""
    assert coordinator.http.get("/health").status_code == 200
    coordinator.server.service.turned_at = time.monotonic() + 3600  # as if frozen since
    turned_at = coordinator.server.service.turned_at
    coordinator.wait(
        lambda: coordinator.server.service.turned_at != turned_at, "the loop shows that it turns"
    )
    service = coordinator.server.service
    service.turned_at = time.monotonic() - 2.1
    assert not service.healthy


def test_misfits_are_refused_and_hear_why(coordinator: RunningCoordinator) -> None:
    other = Fingerprint("other weights", "c", coordinator.fingerprint.tokenizer)
    worker = ScriptedWorker("decode", coordinator.control_endpoint, facts(other))
    coordinator.wait(lambda: worker.rejected is not None, "it hears Reject")
    worker.close()
    assert "other weights" in str(worker.rejected)
    assert coordinator.fingerprint.weights in str(worker.rejected)
    assert worker.worker_id not in [w["worker_id"] for w in coordinator.cluster()["workers"]]


def test_metrics(coordinator: RunningCoordinator) -> None:
    def value(name: str, text: str) -> float:
        lines = [line for line in text.splitlines() if line.startswith(f"splitserve_{name}")]
        assert lines, name
        assert all('model_name="tiny"' in line and "worker_id=" in line for line in lines)
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    before = coordinator.http.get("/metrics").text
    for _ in range(3):
        body = {"prompt": "hello", "max_tokens": 4, "n": 2}
        assert coordinator.http.post("/v1/completions", json=body).status_code == 200
    after = coordinator.http.get("/metrics")
    assert after.headers["content-type"].startswith("text/plain; version=")

    def grown(name: str) -> float:
        return value(name, after.text) - value(name, before)

    assert grown("prompt_tokens_total") == 15, "each prompt once, cluster-wide"
    assert grown("generation_tokens_total") == 24
    for name in ("time_to_first_token", "e2e_request_latency", "handoff_gap", "kv_transfer"):
        assert grown(f"{name}_seconds_count") == 3, name
    assert grown("request_queue_time_seconds_count") == 3
    assert value('request_success_total{finished_reason="length"', after.text) >= 6
    for name in (
        "inter_token_latency_seconds_bucket",
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "num_preemptions",
        "kv_transfer_bytes",
    ):
        value(name, after.text)


@pytest.fixture(scope="module")
def locked(model: Path) -> Iterator[RunningCoordinator]:
    with running(model, api_keys=("key-1", "ключ-2")) as coordinator:
        yield coordinator


@pytest.mark.parametrize("key", [None, "wrong", "key-1x", "key-", "ключ"])
def test_every_route_asks_for_the_key(locked: RunningCoordinator, key: str | None) -> None:
    """sgl-project/sglang#32772: a key guarded /v1 and nothing else."""
    headers: dict[str, Any] = {"authorization": ""}
    if key is not None:
        headers = {"authorization": f"Bearer {key}".encode()}
    for method, path, _ in [*ROUTES, ("GET", "/x", 0)]:
        response = locked.http.request(method, path, headers=headers, content=b"{}")
        is_open = path in ("/live", "/health", "/ready")
        assert response.status_code == (200 if is_open else 401), path
        if not is_open:
            assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("key", ["key-1", "ключ-2"])
def test_each_of_several_keys_is_good(locked: RunningCoordinator, key: str) -> None:
    headers: dict[str, Any] = {"authorization": f"Bearer {key}".encode()}
    assert locked.http.get("/cluster", headers=headers).status_code == 200


def test_off_loopback_needs_a_key(model: Path) -> None:
    import asyncio

    config = CoordinatorConfig(str(model), "tiny", ("tiny",), host="0.0.0.0", port=0)
    with pytest.raises(ConfigError, match="API key"):
        asyncio.run(Server(config).run())
    config = CoordinatorConfig(str(model), "tiny", ("tiny",), port=0, control_host="0.0.0.0")
    with pytest.raises(ConfigError, match="keys"):
        asyncio.run(Server(config).run())


def test_a_port_that_is_taken_is_named(model: Path) -> None:
    import asyncio

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = CoordinatorConfig(str(model), "tiny", ("tiny",), port=port)
        with pytest.raises(ConfigError, match=f"127.0.0.1 port {port}"):
            asyncio.run(Server(config).run())


def test_without_descriptors_new_connections_wait_and_the_log_is_not_flooded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """asyncio logs a traceback for each accept that fails, thousands of times a second."""
    loop = asyncio.new_event_loop()
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            on_loop_error(loop, {"message": "accept failed", "exception": error})
        on_loop_error(loop, {"message": "something else", "exception": ValueError("x")})
    loop.close()
    assert len([r for r in caplog.records if "connections wait" in r.getMessage()]) <= 1
    assert any("something else" in record.getMessage() for record in caplog.records)
