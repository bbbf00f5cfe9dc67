"""A short soak; `make soak` has 2,000 requests."""

from __future__ import annotations

import pytest

from tests.cluster.harness import show
from tests.cluster.soak import run

pytestmark = pytest.mark.breaking

NUM_REQUESTS = 700


def test_blocks_used_over_and_over_stay_right(request: pytest.FixtureRequest) -> None:
    """sgl-project/sglang #23020: right at first, half the answers wrong after 150 requests."""
    report = run(NUM_REQUESTS)
    show(request.config, f"A soak of {NUM_REQUESTS} requests", report.lines)
    assert not report.faults
    assert report.num_reuses > 50
    assert report.num_preemptions > 0
