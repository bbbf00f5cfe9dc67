from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.profiling.evidence import Bottleneck, Evidence
from splitserve.profiling.remedies import merge
from tests.unit.profiling.evidences import busy, evidences


def test_windows_add_up() -> None:
    one = busy(window=3, full_batch_gain=2.0, num_kv_blocks_used=100.0)
    other = busy(window=4, forward_s=0.3, cap_s=0.3, full_batch_gain=6.0, num_steps=60, wait_s=0.6)
    merged = merge([one, other])
    assert (merged.window, merged.num_steps, merged.num_slots_used) == (4, 80, 320)
    assert merged.window_s == pytest.approx(2.0)
    assert merged.forward_s == pytest.approx(1.2)
    assert merged.full_batch_gain == pytest.approx((2 * 0.9 + 6 * 0.3) / 1.2)
    assert merged.num_kv_blocks_used == pytest.approx((100 * 20 + 150 * 60) / 80)


def test_no_windows_make_an_idle_one() -> None:
    assert merge([]) == Evidence()


@pytest.mark.parametrize(
    ("changes", "bottleneck"),
    [
        ({}, "memory"),
        ({"full_batch_gain": 3.0, "cap_s": 0.0, "no_request_s": 0.9}, "batching"),
        ({"window_s": 4.0, "wait_s": 3.0}, "idle"),
    ],
)
def test_the_whole_has_the_class_of_its_windows(
    changes: dict[str, Any], bottleneck: Bottleneck
) -> None:
    assert merge([busy(**changes)] * 3).bottleneck == bottleneck


@given(st.lists(evidences(), min_size=1, max_size=4))
def test_every_second_and_every_step_is_in_the_sum(several: list[Evidence]) -> None:
    merged = merge(several)
    for name in ("window_s", "host_s", "busy_s", "floor_s", "num_steps", "num_bytes"):
        assert getattr(merged, name) == pytest.approx(sum(getattr(e, name) for e in several))
    if any(e.forward_s for e in several):
        gains = [e.full_batch_gain for e in several if e.forward_s]
        assert min(gains) * 0.999 <= merged.full_batch_gain <= max(gains) * 1.001
