from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_llama
from tests.unit.coordinator.running import RunningCoordinator, running
from tests.unit.coordinator.scripted_worker import Script


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[RunningCoordinator]:
    with running(model, max_queue=64) as coordinator:
        yield coordinator


@pytest.fixture
def coordinator(shared: RunningCoordinator) -> Iterator[RunningCoordinator]:
    """One prefill and one decode worker; at rest before and after."""
    script = Script()
    for worker in shared.workers:
        worker.script = script
    yield shared
    script.hold.clear()
    shared.check_at_rest()


@pytest.fixture
def empty(model: Path) -> Iterator[RunningCoordinator]:
    """A coordinator that no worker has joined yet."""
    coordinator = RunningCoordinator(model)
    yield coordinator
    coordinator.close()
