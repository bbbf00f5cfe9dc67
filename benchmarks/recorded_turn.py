"""A turn of a decode loop that computes the same step again and again, with what records it.

Each part of the recording can be replaced by `Nothing`, so that one process measures both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from benchmarks.engine_step import GREEDY, decode_rows
from decode_worker.attribution import Account
from decode_worker.intake import Intake, IntakeLimits
from decode_worker.scheduler import DecodeScheduler
from splitserve.engine.model_runner import ModelRunner
from splitserve.engine.step_work import StepMeter
from splitserve.profiling.observer import Observer
from splitserve.request import Choice
from splitserve.scheduling.block_manager import BlockManager
from splitserve.scheduling.chunking import Planned
from splitserve.scheduling.sequence import Request, RequestKey, Sequence
from splitserve.wire import messages as m
from splitserve.wire.codec import encode
from splitserve.work import StepSpent, StepWork
from tests.fake_recorder import fake_recorder

NO_WORK, NOT_SPENT = StepWork(), StepSpent()


class Nothing:
    """Stands in for all that records, and does nothing."""

    waits_for = "wait"
    _context = nullcontext()

    def lap(self, phase: str) -> None: ...
    def step_of(self, plan: list[Planned]) -> None: ...
    def stepped(self, step: None, spent: StepSpent) -> None: ...
    def did(self, work: StepWork) -> None: ...
    def turned(self, now: float = 0.0) -> tuple[m.Observed, ...]:
        return ()

    def during(self, part: str) -> AbstractContextManager[None]:
        return self._context

    def of(self, *lengths: object) -> StepWork:
        return NO_WORK

    def take(self) -> StepSpent:
        return NOT_SPENT


@dataclass(frozen=True, slots=True)
class Recording:
    """What a decode worker records with, or `Nothing` in place of each part."""

    recorder: Any
    observer: Any
    account: Any
    meter: Any
    work_model: Any


OFF = Recording(*[Nothing()] * 5)


def recording(runner: ModelRunner) -> Recording:
    recorder = fake_recorder()
    blocks = BlockManager(runner.num_blocks)
    scheduler = DecodeScheduler(blocks, runner.layout.block_size, runner.max_num_batched_tokens)
    limits = IntakeLimits(runner.config.max_num_seqs, runner.vocab_size, runner.max_model_len)
    intake = Intake(runner.layout, blocks, limits)
    account = Account(scheduler, intake, limits.max_num_seqs, runner.max_num_batched_tokens)
    observer = Observer("decode-0", recorder, runner)
    return Recording(recorder, observer, account, StepMeter(), runner.work_model)


def plan_of(runner: ModelRunner, batch: int, context: int) -> list[Planned]:
    """A token for each of so many sequences, which stay as they are."""
    plan = []
    for order, chunk in enumerate(decode_rows(runner, batch, context)):
        tokens, choices = list(chunk.token_ids), (Choice(0, 0),)
        key, end = RequestKey(str(order), 0), float("inf")
        request = Request(key, "", tuple(tokens), len(tokens), choices, GREEDY, end, end)
        sequence = Sequence(request, choices, tokens, order, list(chunk.block_ids))
        plan.append(Planned(sequence, chunk.start, chunk.end))
    return plan


def turn(parts: Recording, plan: list[Planned], step: Callable[[], object]) -> None:
    """What DecodeWorker.run records around a step."""
    lap = parts.recorder.lap
    parts.account.waits_for  # noqa: B018
    lap("receive")
    lap("receive")
    lap("schedule")
    step()
    parts.recorder.stepped(parts.account.step_of(plan), parts.meter.take())
    lap("send")
    parts.recorder.turned()
    for report in parts.observer.turned(time.monotonic()):
        encode(report)
    lap("other")


@contextmanager
def recorded_by(runner: ModelRunner, parts: Recording) -> Iterator[None]:
    before = runner._meter, runner.work_model
    runner._meter, runner.work_model = parts.meter, parts.work_model
    yield
    runner._meter, runner.work_model = before
