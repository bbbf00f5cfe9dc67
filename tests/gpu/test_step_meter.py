"""Timing a step by the GPU's own clock."""

from __future__ import annotations

import time

import pytest
import torch

from splitserve.engine.step_work import meter_for
from splitserve.work import StepWork

if not torch.cuda.is_available():
    pytest.skip("torch.cuda.is_available() is false", allow_module_level=True)

SIZE, NUM_MATMULS = 8192, 40
NUM_FLOPS = NUM_MATMULS * 2 * SIZE**3
NO_GPU_FLOPS_PER_S = 10e15  # dense bfloat16; the fastest of 2025 has a quarter of it


@pytest.fixture
def device() -> torch.device:
    """The last one: not the current one where there are several."""
    return torch.device("cuda", torch.cuda.device_count() - 1)


def multiply(a: torch.Tensor) -> None:
    """Launched within a few hundred microseconds, computed long after."""
    for _ in range(NUM_MATMULS):
        torch.mm(a, a)


def test_a_part_is_as_long_as_the_gpu_works_on_it(device: torch.device) -> None:
    a = torch.ones(SIZE, SIZE, dtype=torch.bfloat16, device=device)
    multiply(a)
    torch.cuda.synchronize(device)
    meter = meter_for(device)
    started_at = time.perf_counter()
    with meter.during("forward"):
        multiply(a)
    meter.did(StepWork(1, NUM_FLOPS))
    spent = meter.take()
    wall_s = time.perf_counter() - started_at
    assert spent.work == StepWork(1, NUM_FLOPS)
    assert NUM_FLOPS / NO_GPU_FLOPS_PER_S < spent.forward_s < wall_s
    assert (spent.prepare_s, spent.sample_s) == (0.0, 0.0)
    assert meter.take().forward_s == 0.0


def test_parts_of_host_work_and_of_gpu_work_add_up(device: torch.device) -> None:
    """Recorder takes what they leave of the wall clock for something else."""
    a = torch.ones(SIZE, SIZE, dtype=torch.bfloat16, device=device)
    torch.cuda.synchronize(device)
    meter = meter_for(device)
    started_at = time.perf_counter()
    with meter.during("prepare"):
        prepared_at = time.perf_counter()
        sum(range(1_000_000))
        prepare_s = time.perf_counter() - prepared_at
    with meter.during("forward"):
        multiply(a)
    with meter.during("sample"):
        a.sum().item()
    wall_s = time.perf_counter() - started_at
    spent = meter.take()
    assert spent.prepare_s > prepare_s / 2
    assert spent.sample_s > 0
    assert spent.prepare_s + spent.forward_s + spent.sample_s <= wall_s


def test_what_raises_counts_too(device: torch.device) -> None:
    meter = meter_for(device)
    with pytest.raises(ZeroDivisionError), meter.during("forward"):
        torch.ones(1 << 20, device=device).sum()
        1 / 0  # noqa: B018
    assert meter.take().forward_s > 0
