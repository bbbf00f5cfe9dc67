"""A minute of chaos; `make chaos` is ten of them."""

from __future__ import annotations

import pytest

from tests.cluster.chaos import run
from tests.cluster.harness import show

pytestmark = pytest.mark.breaking

DURATION_S = 60.0


def test_chaos_loses_nothing(request: pytest.FixtureRequest) -> None:
    """ai-dynamo/dynamo #13088: under churn 1.6 % of requests never ended."""
    report = run(DURATION_S)
    show(request.config, f"{DURATION_S:g} s of chaos", report.lines)
    assert not report.faults
    assert len(report.strikes) > DURATION_S / 6
    assert sum(one.verdict == "right" for one in report.asked) > len(report.asked) / 2
