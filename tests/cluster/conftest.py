"""One cluster for each test file that asks for `ring`; drained after every test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.faulty import FaultyRing, tiny_faulty
from tests.cluster.harness import Ring, running


@pytest.fixture(scope="module")
def shared_ring(request: pytest.FixtureRequest) -> Iterator[Ring]:
    """The cluster of this file: its module says which with CLUSTER = {flag: value}.

    FAULTY = {flag: value} asks for a tiny model, and for workers with faults around them.
    """
    if (faulty_flags := getattr(request.module, "FAULTY", None)) is not None:
        with tiny_faulty(**faulty_flags) as faulty_ring:
            yield faulty_ring
        return
    flags: dict[str, Any] = getattr(request, "param", None) or getattr(
        request.module, "CLUSTER", {}
    )
    with running(**flags) as ring:
        yield ring


@pytest.fixture
def ring(shared_ring: Ring) -> Iterator[Ring]:
    """The file's cluster; when the test is over nothing may be held anywhere."""
    if isinstance(shared_ring, FaultyRing):
        shared_ring.wait_whole()
    yield shared_ring
    if isinstance(shared_ring, FaultyRing):
        shared_ring.reset()
    shared_ring.assert_drained()
