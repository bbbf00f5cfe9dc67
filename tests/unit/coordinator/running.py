"""A real coordinator on a thread of the test's process, with scripted workers around it."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from coordinator.server import Server
from splitserve.config import CoordinatorConfig, Liveness
from splitserve.models import fingerprint
from tests.unit.coordinator.scripted_worker import Script, ScriptedWorker, facts
from tests.waiting import wait_until

MODEL_NAME = "tiny"
LIVENESS = Liveness(heartbeat_interval_s=0.1, heartbeat_timeout_s=2.0)


class RunningCoordinator:
    """Owns a coordinator, its workers, and an HTTP client."""

    def __init__(self, model: Path, **config: Any) -> None:
        options: dict[str, Any] = {"port": 0, "liveness": LIVENESS, **config}
        self.config = CoordinatorConfig(str(model), MODEL_NAME, (MODEL_NAME,), **options)
        self.fingerprint = fingerprint(model)
        self.workers: list[ScriptedWorker] = []
        reader, writer = os.pipe()
        self.server = Server(self.config, writer)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        with os.fdopen(reader) as pipe:
            self.control_endpoint: str = json.loads(pipe.readline())["control_endpoint"]
        self.url = self.server.url
        keys = self.config.api_keys
        headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=30.0, trust_env=False)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self.server.run())
        self._loop.close()

    def add(self, role: Any, script: Script | None = None, **changes: int) -> ScriptedWorker:
        """Another worker; prefill workers hand over to the first decode worker there is."""
        worker = ScriptedWorker(
            role, self.control_endpoint, facts(self.fingerprint, **changes), script
        )
        self.workers.append(worker)
        decoders = [w for w in self.workers if w.role == "decode"]
        for one in self.workers:
            one.decoder = decoders[0] if decoders else None
        return worker

    def wait_ready(self) -> None:
        self.wait(lambda: self.http.get("/ready").status_code == 200, "the cluster is ready")

    def wait(self, condition: Any, what: str) -> None:
        wait_until(condition, 10.0, what)

    def cluster(self) -> dict[str, Any]:
        body: dict[str, Any] = self.http.get("/cluster").json()
        return body

    def check_at_rest(self) -> None:
        """Nothing is in flight anywhere, and nothing is remembered of what was."""
        self.wait(lambda: self._num_held() == 0, "every request is gone")

    def _num_held(self) -> int:
        coordinator = self.cluster()["coordinator"]
        held = sum(worker.num_requests for worker in self.workers)
        waiting = coordinator["num_requests_waiting"] + coordinator["num_requests_in_flight"]
        return int(held + waiting + len(self.server.service._tickets._tickets))

    def stop(self) -> None:
        """As SIGTERM does."""
        self._loop.call_soon_threadsafe(self.server.stop)

    def close(self) -> None:
        self.http.close()
        if not self._loop.is_closed():
            self.stop()
        self._thread.join(10.0)
        assert not self._thread.is_alive(), "the coordinator did not stop"
        for worker in self.workers:
            worker.close()


@contextmanager
def running(
    model: Path, num_prefill: int = 1, num_decode: int = 1, **config: Any
) -> Iterator[RunningCoordinator]:
    """A coordinator that is ready, with its workers."""
    coordinator = RunningCoordinator(
        model, num_prefill=num_prefill, num_decode=num_decode, **config
    )
    try:
        script = Script()
        for _ in range(num_decode):
            coordinator.add("decode", script)
        for _ in range(num_prefill):
            coordinator.add("prefill", script)
        coordinator.wait_ready()
        yield coordinator
    finally:
        coordinator.close()
