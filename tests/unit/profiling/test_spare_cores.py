"""What a host's cores allow: more threads, or workers on another machine."""

from __future__ import annotations

import dataclasses
import math

import pytest

from splitserve.profiling.ideas import FASTER_KERNELS
from tests.unit.profiling.evidences import busy
from tests.unit.profiling.test_remedies import COMPUTE, DECODE, PREFILL, remedy, titles

FAR_FROM_ITS_ROOF: dict[str, float] = {
    "floor_s": 0.09,
    "memory_floor_s": 0.09,
    "compute_floor_s": 0.01,
}


@pytest.mark.parametrize(
    ("num_spare", "title", "faster"),
    [
        (5, "more threads: 2 to 4", 1.5),
        (2, "more threads: 2 to 4", 1.5),
        (1, "more threads: 2 to 3", 1.5 ** math.log2(3 / 2)),
    ],
)
def test_no_more_threads_than_the_host_has_cores(num_spare: int, title: str, faster: float) -> None:
    facts = dataclasses.replace(DECODE, num_spare_cores=num_spare)
    found = remedy(busy(**FAR_FROM_ITS_ROOF), facts, "more threads")
    assert found.title == title
    assert found.speedup == pytest.approx(1 / (1 - 0.9 * (1 - 1 / faster)))
    assert found.arithmetic.startswith(f"cores of its host that no worker uses: {num_spare};")


def test_without_spare_cores_threads_are_no_remedy_and_workers_go_elsewhere() -> None:
    full = dataclasses.replace(PREFILL, num_spare_cores=0)
    assert titles(busy(**FAR_FROM_ITS_ROOF), full) == [FASTER_KERNELS]
    more = remedy(busy(**COMPUTE), full, "more prefill workers: 2 to 3")
    assert more.speedup == pytest.approx(1.5)
    text = "this host has 0 to spare where one takes 2: another machine is needed"
    assert text in more.arithmetic
    roomy = dataclasses.replace(full, num_spare_cores=2)
    on_gpu = dataclasses.replace(full, device="cuda:0")
    for facts in (PREFILL, roomy, on_gpu):
        more = remedy(busy(**COMPUTE), facts, "more prefill workers: 2 to 3")
        assert "another machine" not in more.arithmetic
