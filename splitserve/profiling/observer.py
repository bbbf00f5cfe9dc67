"""Tells the coordinator, for as long as it asked for, every step and window of a worker."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from splitserve.profiling.evidence import Evidence
from splitserve.profiling.recorder import Recorder
from splitserve.wire import messages as m
from splitserve.work import Operation

REPORT_EVERY_S = 0.5
MAX_ROWS = 512  # of one report; more are taken as a reason to report at once
MAX_KERNELS = 1000  # of one report; while there are more, each turn of the loop reports
MAX_NAME_CHARS = 200  # of an operation


class Traced(Protocol):
    """What can watch the operations of its steps."""

    def trace_next(self, num_steps: int) -> None: ...
    def take_kernels(self) -> tuple[list[Operation], int]: ...


class Observer:
    """Owns how long a worker is observed, and what of its log was reported."""

    def __init__(self, worker_id: str, recorder: Recorder, runner: Traced) -> None:
        self._worker_id = worker_id
        self._recorder = recorder
        self._runner = runner
        self._epoch = ""
        self._began_at = 0.0
        self._ends_at: float | None = None
        self._reports_at = 0.0
        self._num_rows = 0  # reported
        self._windows: list[tuple[float, Evidence]] = []  # with the moment it closed
        self._last_window = 0
        self._kernels: deque[Operation] = deque()
        self._num_kernels_lost = 0

    def begin(self, message: m.Observe, now: float) -> None:
        """Report from now on, for the longer time of all who asked; no time at all ends it."""
        if message.duration_s <= 0:
            self._ends_at = None
            self._runner.trace_next(0)
            return
        if self._ends_at is None:
            self._began_at = now
            self._num_rows = self._recorder.log.num_rows
            self._windows.clear()
            self._runner.take_kernels()
            self._last_window = self._window
        self._epoch = message.epoch
        self._ends_at = max(self._ends_at or now, now + message.duration_s)
        self._reports_at = now + REPORT_EVERY_S
        if message.num_kernel_steps:
            self._runner.trace_next(message.num_kernel_steps)

    def due(self) -> float:
        """When `turned` has something to say, whatever the loop does."""
        if self._ends_at is None:
            return float("inf")
        return 0.0 if self._kernels else min(self._reports_at, self._ends_at)

    def turned(self, now: float) -> list[m.Observed]:
        """The loop has turned; what is to be told of it by now."""
        if self._ends_at is None:
            return []
        self._look()
        num_new = self._recorder.log.num_rows - self._num_rows
        is_due = now >= min(self._reports_at, self._ends_at) or num_new >= MAX_ROWS
        if not is_due and not self._kernels:
            return []
        report = self._report(now)
        self._reports_at = now + REPORT_EVERY_S
        if now >= self._ends_at and not self._kernels:
            self._ends_at = None
            self._runner.trace_next(0)
        return [report] if report.rows or report.windows or report.kernels else []

    @property
    def _window(self) -> int:
        evidence = self._recorder.evidence
        return 0 if evidence is None else evidence.window

    def _look(self) -> None:
        """What is new since the last turn, but for rows: their log keeps those."""
        evidence = self._recorder.evidence
        if evidence is not None and evidence.window > self._last_window:
            self._last_window = evidence.window
            # One that began before belongs to another time: an idle worker's may be hours long.
            if self._recorder.closed_at - evidence.window_s >= self._began_at:
                self._windows.append((self._recorder.closed_at, evidence))
        kernels, num_lost = self._runner.take_kernels()
        self._kernels.extend(kernels)
        self._num_kernels_lost += num_lost

    def _report(self, now: float) -> m.Observed:
        log = self._recorder.log
        rows = log.since(self._num_rows)
        num_lost = log.num_rows - self._num_rows - len(rows) + self._num_kernels_lost
        self._num_rows, self._num_kernels_lost = log.num_rows, 0
        rows["ended_at"] = now - rows["ended_at"]
        windows = tuple(m.ObservedWindow(now - at, evidence) for at, evidence in self._windows)
        self._windows.clear()
        told = tuple(tuple(map(float, row)) for row in rows.tolist())
        kernels = self._some_kernels(now)
        return m.Observed(self._worker_id, self._epoch, told, windows, num_lost, kernels)

    def _some_kernels(self, now: float) -> tuple[m.KernelEvent, ...]:
        some = [self._kernels.popleft() for _ in range(min(MAX_KERNELS, len(self._kernels)))]
        return tuple(
            m.KernelEvent(one.name[:MAX_NAME_CHARS], now - one.started_at, one.duration_s)
            for one in some
        )
