"""A cluster for each test file that asks for `ring`; drained after every test.

Files that want the same cluster run one after another and share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.cluster.faulty import FaultyRing, faulty
from tests.cluster.harness import Ring, running
from tests.cluster.shim import Shim, pass_on
from tests.tiny_models import make_tiny_llama

Wanted = tuple[str, dict[str, Any]]


def wanted_by(module: ModuleType) -> Wanted | None:
    """The cluster of this file: its module says which with {flag: value}.

    CLUSTER asks for a real model, TINY for a tiny random one, and FAULTY for that one in workers
    with faults around them.
    """
    for kind in ("CLUSTER", "TINY", "FAULTY"):
        if (flags := getattr(module, kind, None)) is not None:
            return kind, flags
    return None


class Clusters:
    """Owns the cluster that was asked for last, as long as the same one is wanted."""

    def __init__(self, tiny_model: Path) -> None:
        self._tiny_model = tiny_model
        self._stack = ExitStack()
        self._wanted: Wanted | None = None
        self._ring: Ring | None = None
        self.is_spoilt = False

    def ring(self, wanted: Wanted) -> Ring:
        self.keep(wanted)
        if self._ring is None:
            self._ring = self._stack.enter_context(self._start(*wanted))
            self._wanted = wanted
        return self._ring

    def _start(self, kind: str, flags: dict[str, Any]) -> AbstractContextManager[Ring]:
        if kind == "FAULTY":
            return faulty(self._tiny_model, **flags)
        model = {} if kind == "CLUSTER" else {"model": str(self._tiny_model)}
        return running(**model, **flags)

    def keep(self, wanted: Wanted | None) -> None:
        """Stop the cluster that is there, unless it is this one."""
        if self.is_spoilt or wanted is None or wanted != self._wanted:
            self._wanted = self._ring = None
            self.is_spoilt = False
            self._stack.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that want the same cluster go one after another, from where the first of them was."""
    ours = [
        place
        for place, item in enumerate(items)
        if isinstance(item, pytest.Function) and item.path.parent == Path(__file__).parent
    ]
    groups: dict[str, list[pytest.Item]] = {}
    for place in ours:
        item = items[place]
        assert isinstance(item, pytest.Function)
        name = repr(wanted_by(item.module) or item.module.__name__)
        groups.setdefault(name, []).append(item)
    grouped = [item for group in groups.values() for item in group]
    for place, item in zip(ours, grouped, strict=True):
        items[place] = item


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with room for long prompts."""
    path = tmp_path_factory.mktemp("tiny") / "model"
    return make_tiny_llama(path, max_position_embeddings=2048)


@pytest.fixture(scope="session")
def clusters(tiny_model: Path) -> Iterator[Clusters]:
    clusters = Clusters(tiny_model)
    yield clusters
    clusters.keep(None)


@pytest.fixture(scope="module", autouse=True)
def no_other_cluster(request: pytest.FixtureRequest, clusters: Clusters) -> None:
    """What an earlier file has left running disturbs nobody who wants something else."""
    clusters.keep(wanted_by(request.module))


@pytest.fixture(scope="module")
def shared_ring(request: pytest.FixtureRequest, clusters: Clusters) -> Ring:
    """The cluster of this file, or with the flags of a parameter."""
    kind, flags = wanted_by(request.module) or ("CLUSTER", {})
    return clusters.ring((kind, getattr(request, "param", flags)))


@pytest.fixture
def ring(shared_ring: Ring, clusters: Clusters) -> Iterator[Ring]:
    """The file's cluster; when the test is over nothing may be held anywhere."""
    if isinstance(shared_ring, FaultyRing):
        shared_ring.wait_whole()
    yield shared_ring
    try:
        if isinstance(shared_ring, FaultyRing):
            shared_ring.reset()
        shared_ring.assert_drained()
    except Exception:
        clusters.is_spoilt = True  # the next file gets another one
        raise


@pytest.fixture(scope="module")
def shim() -> Shim:
    """Between the workers of a cluster that was started with `around=shim.between`."""
    return Shim()


@pytest.fixture
def calm(shim: Shim) -> Iterator[None]:
    """For files with a shim: after each test it does nothing any more."""
    yield
    shim.rule = pass_on
