"""The operations of a few steps of a tiny model, as torch's profiler tells them."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.autograd.profiler import profile

from splitserve.engine import kernel_trace
from splitserve.engine.kernel_trace import KernelTrace
from splitserve.work import Operation
from tests.unit.engine.conftest import LoadRunner
from tests.unit.engine.sequences import Prompts, chunk

MATMUL = "aten::mm"


def step(trace: KernelTrace) -> None:
    with trace.step():
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))


def num_matmuls(operations: list[Operation]) -> int:
    return Counter(one.name for one in operations)[MATMUL]


@pytest.fixture
def trace() -> KernelTrace:
    return KernelTrace()


def test_as_many_steps_are_watched_as_were_asked_for(trace: KernelTrace) -> None:
    step(trace)
    assert trace.take() == ([], 0), "nobody asked"
    trace.watch(2)
    for _ in range(3):
        step(trace)
    assert num_matmuls(trace.take()[0]) == 2
    assert trace.take() == ([], 0)


def test_operations_lie_within_their_step_on_the_monotonic_clock(trace: KernelTrace) -> None:
    trace.watch(1)
    began = time.monotonic()
    step(trace)
    ended = time.monotonic()
    operations, num_left_out = trace.take()
    assert num_matmuls(operations) == 1 and num_left_out == 0
    for one in operations:  # the two clocks are read one after the other
        assert began - 0.01 <= one.started_at <= one.started_at + one.duration_s <= ended + 0.01


def test_watching_can_be_ended(trace: KernelTrace) -> None:
    trace.watch(3)
    step(trace)
    trace.watch(0)
    step(trace)
    assert num_matmuls(trace.take()[0]) == 1


def test_there_is_a_bound_and_what_is_beyond_it_is_counted(
    trace: KernelTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace.watch(1)
    step(trace)
    num_whole = len(trace.take()[0])
    monkeypatch.setattr(kernel_trace, "MAX_OPERATIONS", num_whole + 1)
    trace.watch(3)
    for _ in range(3):
        step(trace)
    operations, num_left_out = trace.take()
    assert len(operations) == num_whole + 1
    assert num_left_out == 2 * num_whole - 1


class StartsNot(profile):
    def __enter__(self) -> None:
        raise RuntimeError("it does not start")


class StopsBadly(profile):
    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        raise RuntimeError("it does not stop")


@pytest.mark.parametrize("failing", [StartsNot, StopsBadly])
def test_a_step_goes_on_when_the_profiler_fails(
    failing: type[profile],
    trace: KernelTrace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trace.watch(5)
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patched:
        patched.setattr(kernel_trace, "profile", failing)
        step(trace)
        step(trace)
    assert len(caplog.messages) == 1 and "profiler failed" in caplog.text
    step(trace)
    assert trace.take() == ([], 0)
    trace.watch(1)
    step(trace)
    assert num_matmuls(trace.take()[0]) == 1, "and may be asked again"


def test_a_step_that_fails_is_watched_too(trace: KernelTrace) -> None:
    trace.watch(1)
    with pytest.raises(RuntimeError, match="shape"), trace.step():
        torch.mm(torch.ones(2, 2), torch.ones(3, 3))
    assert num_matmuls(trace.take()[0]) == 1


def test_a_model_tells_its_operations_and_computes_the_same(
    tiny_llama: Path, load: LoadRunner
) -> None:
    runner = load(tiny_llama)
    prompts = Prompts(96)
    chunks = [chunk(prompts.token_ids(20), 0, 20, prompts.blocks(20))]
    plain = runner.step(chunks)
    runner.trace_next(1)
    assert runner.step(chunks) == plain == runner.step(chunks)
    operations, _ = runner.take_kernels()
    counts = Counter(one.name for one in operations)
    assert counts["aten::scaled_dot_product_attention"] == 2, "one a layer"


def test_watching_does_not_load_half_of_torch() -> None:
    """The usual profiler imports torch._inductor at its first start: a second or two."""
    code = """
import sys, torch
from splitserve.engine.kernel_trace import KernelTrace
before = set(sys.modules)
trace = KernelTrace()
trace.watch(1)
with trace.step():
    torch.ones(2)
assert trace.take()[0]
print(*set(sys.modules) - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) < 20
