"""Tells the coordinator, for as long as it asked for, every step and window of a worker."""

from __future__ import annotations

from splitserve.profiling.recorder import Recorder
from splitserve.wire import messages as m

REPORT_EVERY_S = 0.5
MAX_ROWS = 512  # of one report; more are taken as a reason to report at once


class Observer:
    """Owns how long a worker is observed, and what of its log was reported."""

    def __init__(self, worker_id: str, recorder: Recorder) -> None:
        self._worker_id = worker_id
        self._recorder = recorder
        self._epoch = ""
        self._ends_at: float | None = None
        self._reports_at = 0.0
        self._num_rows = 0  # reported
        self._windows: list[m.ObservedWindow] = []
        self._last_window = 0

    def begin(self, message: m.Observe, now: float) -> None:
        """Report from now on. Who is observed already goes on for the longer of the two times."""
        if self._ends_at is None:
            self._num_rows = self._recorder.log.num_rows
            self._windows.clear()
            self._last_window = self._window
        self._epoch = message.epoch
        self._ends_at = max(self._ends_at or now, now + message.duration_s)
        self._reports_at = now + REPORT_EVERY_S

    def due(self) -> float:
        """When `turned` has something to say, whatever the loop does."""
        return float("inf") if self._ends_at is None else min(self._reports_at, self._ends_at)

    def turned(self, now: float) -> list[m.Observed]:
        """The loop has turned; what is to be told of it by now."""
        if self._ends_at is None:
            return []
        evidence = self._recorder.evidence
        if evidence is not None and evidence.window > self._last_window:
            self._last_window = evidence.window
            self._windows.append(m.ObservedWindow(self._recorder.closed_at, evidence))
        num_new = self._recorder.log.num_rows - self._num_rows
        if now < min(self._reports_at, self._ends_at) and num_new < MAX_ROWS:
            return []
        report = self._report(now)
        self._reports_at = now + REPORT_EVERY_S
        if now >= self._ends_at:
            self._ends_at = None
        return [report] if report.rows or report.windows else []

    @property
    def _window(self) -> int:
        evidence = self._recorder.evidence
        return 0 if evidence is None else evidence.window

    def _report(self, now: float) -> m.Observed:
        log = self._recorder.log
        rows = log.since(self._num_rows)
        num_lost = log.num_rows - self._num_rows - len(rows)
        self._num_rows = log.num_rows
        rows["ended_at"] = now - rows["ended_at"]
        windows = tuple(m.ObservedWindow(now - w.age_s, w.evidence) for w in self._windows)
        self._windows.clear()
        told = tuple(tuple(map(float, row)) for row in rows.tolist())
        return m.Observed(self._worker_id, self._epoch, told, windows, num_lost)
