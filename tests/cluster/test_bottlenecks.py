"""Every class of bottleneck, planted on real workers: they name it themselves.

The model is large enough for its forward passes to outweigh Python, and small enough to make.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from splitserve.profiling.evidence import Bottleneck
from tests.cluster.clients import prompt
from tests.cluster.faulty import FaultyRing, faulty
from tests.cluster.harness import Body
from tests.tiny_models import make_tiny_llama
from tests.waiting import wait_until

pytestmark = pytest.mark.breaking

PROFILE_S = 7.0
SHARE = 0.95  # of whole windows that say what was planted
MANY_SLOTS = 64
SPLIT = {"prefill": 1, "decode": 1, "num_blocks": 512, "decode_max_num_seqs": MANY_SLOTS}
CLUSTERS: dict[str, dict[str, Any]] = {
    "split": SPLIT,
    "slow attention": {**SPLIT, "attention_backend": "reference", "decode_max_num_seqs": 4},
    "aggregated": {"prefill": 0, "decode": 1, "num_blocks": 1024, "decode_max_num_seqs": 4},
}


class Plant(NamedTuple):
    """A bottleneck, and what makes it."""

    bottleneck: Bottleneck
    role: str
    cluster: str
    num_clients: int
    body: Callable[[int], Body]
    pace: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        return f"{self.bottleneck} on {self.role}"


def prompts(num_tokens: int, **options: Any) -> Callable[[int], Body]:
    """Requests that end with their first token, unless told otherwise."""
    return lambda n: {"prompt": prompt(n, num_tokens), "max_tokens": 1, **options}


def streams(num_tokens: int, max_tokens: int) -> Callable[[int], Body]:
    return prompts(num_tokens, max_tokens=max_tokens, stream=True)


PLANTS = [
    Plant("idle", "prefill", "split", 0, prompts(1)),
    Plant("idle", "decode", "split", 0, prompts(1)),
    Plant("batching", "prefill", "split", 2, prompts(2)),
    Plant("batching", "decode", "split", 1, streams(16, 4000)),
    Plant("host", "prefill", "split", 3, prompts(32), (("schedule_s", 0.03),)),
    Plant("host", "decode", "split", 4, streams(16, 4000), (("schedule_s", 0.03),)),
    Plant("transfer", "prefill", "split", 2, prompts(64, max_tokens=2), (("frame_s", 0.02),)),
    Plant("transfer", "decode", "split", 2, prompts(64, max_tokens=2), (("frame_s", 0.02),)),
    Plant("compute", "prefill", "split", 3, prompts(512)),
    Plant("kernels", "decode", "slow attention", 4, streams(512, 2000)),
    Plant("compute", "decode", "aggregated", 3, prompts(512)),
    Plant("memory", "decode", "aggregated", 4, streams(3000, 1000)),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 8192,
    }
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "model", **sizes)


class PlantedClusters:
    """Owns the cluster that was asked for last."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._stack = contextlib.ExitStack()
        self._running: tuple[str, FaultyRing] | None = None

    def get(self, name: str) -> FaultyRing:
        if self._running is None or self._running[0] != name:
            self.close()
            flags = {"max_num_batched_tokens": 512, **CLUSTERS[name]}
            self._running = name, self._stack.enter_context(faulty(self._model, **flags))
        return self._running[1]

    def close(self) -> None:
        self._running = None
        self._stack.close()


@pytest.fixture(scope="module")
def planted(model: Path) -> Iterator[PlantedClusters]:
    clusters = PlantedClusters(model)
    yield clusters
    clusters.close()


@contextlib.contextmanager
def load(ring: FaultyRing, plant: Plant) -> Iterator[None]:
    """Clients who each ask again as soon as they have their answer."""
    over, numbers = threading.Event(), itertools.count()
    failures: list[str] = []

    def client() -> None:
        with httpx.Client(base_url=ring.base_url, timeout=60, verify=False) as http:
            while not over.is_set():
                try:
                    use_up(http, plant.body(next(numbers)), over)
                except (AssertionError, httpx.TransportError) as error:
                    failures.append(repr(error))
                    return

    threads = [threading.Thread(target=client) for _ in range(plant.num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(30)
        assert not failures, failures


def use_up(http: httpx.Client, body: Body, over: threading.Event) -> None:
    """Read an answer to its end, or until the load is over."""
    body = {"temperature": 0, "ignore_eos": True, **body}
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            assert "error" not in line, line
            if over.is_set():
                return


def is_flowing(ring: FaultyRing, plant: Plant) -> bool:
    """Whether the worker does what it will do until the load ends."""
    [worker] = ring.ready(plant.role)
    if plant.bottleneck == "idle":
        return bool(worker["bottleneck"] == "idle")
    if plant.role == "decode" and plant.body(0).get("stream"):
        last = worker["evidence"] or {"num_prefill_tokens": 1}
        is_decoding = last["num_prefill_tokens"] == 0 and last["num_decode_tokens"] > 0
        return is_decoding and bool(worker["num_requests_running"] == plant.num_clients)
    return bool(worker["num_tokens_prefilled"] or worker["num_tokens_decoded"])


def windows_of(ring: FaultyRing, role: str) -> list[Body]:
    """The windows of a worker that lie whole within a profile."""
    worker_ids, windows = set(), []
    body = {"duration_s": PROFILE_S}
    with ring.http.stream("POST", "/cluster/profile", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in map(json.loads, response.iter_lines()):
            if line["type"] == "start":
                worker_ids = {w["worker_id"] for w in line["workers"] if w["role"] == role}
            elif line["type"] == "window" and line["worker_id"] in worker_ids:
                if line["at"] >= line["evidence"]["window_s"]:
                    windows.append(line["evidence"])
    return windows


@pytest.mark.parametrize("plant", PLANTS, ids=str)
def test_a_planted_bottleneck_is_named(planted: PlantedClusters, plant: Plant) -> None:
    ring = planted.get(plant.cluster)
    ring.reset()
    ring.pace.write(**dict(plant.pace))
    with load(ring, plant):
        wait_until(lambda: is_flowing(ring, plant), 90, f"a load that makes {plant}")
        windows = windows_of(ring, plant.role)
        if plant.bottleneck == "idle":
            windows += [w["evidence"] for w in ring.ready(plant.role)]
    names = [window["bottleneck"] for window in windows]
    assert len(names) >= (1 if plant.bottleneck == "idle" else 3), names
    right = names.count(plant.bottleneck)
    assert right >= SHARE * len(names), "\n".join(map(str, windows))
