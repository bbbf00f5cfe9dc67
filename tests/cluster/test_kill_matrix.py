"""State of a request x process that is hit x signal: every request ends well, and soon."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cluster.faulty import TWO_EACH, FaultyRing
from tests.cluster.harness import show
from tests.cluster.kill_matrix import HEADING, NO_DRAINING_COORDINATOR, Matrix, Victim

pytestmark = pytest.mark.breaking

FAULTY = TWO_EACH
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest, shared_ring: FaultyRing) -> Iterator[Matrix]:
    """A cluster for all cells, and the table of those tried."""
    shared_ring.wait_whole()
    with ThreadPoolExecutor(64) as pool:
        matrix = Matrix(shared_ring, pool)
        yield matrix
        shared_ring.reset()
    cells = [*matrix.cells, *NO_DRAINING_COORDINATOR]
    show(request.config, "The kill matrix", [HEADING, *map(str, cells)])


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("victim", ["prefill", "decode", "coordinator"])
def test_every_request_outlives(matrix: Matrix, victim: Victim, number: signal.Signals) -> None:
    """vllm-project/vllm #35943, ai-dynamo/dynamo #13088: requests that never ended.

    A worker's end costs no request; the coordinator's breaks every connection, visibly.
    """
    num_before = len(matrix.faults)
    matrix.strike(victim, number)
    assert not matrix.faults[num_before:]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_every_request_outlives_a_drain_that_is_cut_short(
    matrix: Matrix, victim: Victim, number: signal.Signals
) -> None:
    """ai-dynamo/dynamo #9344: memory was freed under transfers that still ran."""
    num_before = len(matrix.faults)
    matrix.strike(victim, number, draining=True)
    assert not matrix.faults[num_before:]
