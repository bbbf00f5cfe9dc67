"""A worker's own stopwatch: laps of its loop, one row a step, one Evidence a second.

    loop   wait │ receive │ schedule │ prepare forward sample │ send │ other │ wait …
    row         └──────────────────── one step ───────────────────────┘
    window ├────────────── about a second, whole turns ─────────────┤ ► Evidence

Laps follow each other without a hole, so phases add up to wall time. What no name fits is `other`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from splitserve.profiling.classify import classify
from splitserve.profiling.evidence import PHASES, SLOT_LIMITS, Evidence, Phase, SlotLimit
from splitserve.profiling.roofs import raised
from splitserve.profiling.step_log import Rows, StepLog
from splitserve.work import Ceilings, StepSpent, StepWork

WINDOW_S = 1.0
_PLACES = {phase: place for place, phase in enumerate(PHASES)}
_SUMMED = (
    *("num_prefill_tokens", "num_decode_tokens", "num_slots_used", "num_slots_allowed"),
    *("num_bytes", "num_flops"),
)
_WAITS: tuple[Phase, ...] = ("wait", "kv_wait")
_STEADY_SHARE = 0.99  # of a window in one wait: the next one would say the same


@dataclass(frozen=True, slots=True)
class Step:
    """What a worker computed in one step, and why it was not more."""

    num_prefill_tokens: int
    num_decode_tokens: int
    num_slots_used: int  # sequences (decode), tokens (prefill)
    num_slots_allowed: int
    limit: SlotLimit
    num_kv_blocks_used: int


class Recorder:
    """Owns the step log of one worker and the window that is open."""

    def __init__(
        self,
        ceilings: Ceilings,
        weight_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        on_raised: Callable[[Ceilings], None] = lambda roofs: None,
    ) -> None:
        """`on_raised` gets the ceilings whenever a window turns out to be above them."""
        self.log = StepLog()
        self.evidence: Evidence | None = None  # of the last whole window
        self.closed_at = 0.0  # when that one ended
        self.ceilings = ceilings
        self.weight_bytes = weight_bytes
        self._clock = clock
        self._on_raised = on_raised
        self._lapped_at = self._window_began = clock()
        self._spent = [0.0] * len(PHASES)  # seconds in each phase, since the start
        self._before_row = list(self._spent)
        self._before_window = list(self._spent)
        self._step: tuple[Step, StepWork] | None = None  # computed in this turn
        self._first_row = 0  # of the window, in the log
        self._steady: Phase | None = None  # the wait that filled the last window

    def lap(self, phase: Phase) -> None:
        """The time since the last lap was spent so."""
        now = self._clock()
        self._spent[_PLACES[phase]] += now - self._lapped_at
        self._lapped_at = now

    def stepped(self, step: Step, spent: StepSpent) -> None:
        """A step is computed. What it does not account for since the last lap has no name."""
        now = self._clock()
        rest_s = now - self._lapped_at - spent.prepare_s - spent.forward_s - spent.sample_s
        self._lapped_at = now
        self._spent[_PLACES["prepare"]] += spent.prepare_s
        self._spent[_PLACES["other"]] += max(0.0, rest_s)
        self._spent[_PLACES["forward"]] += spent.forward_s
        self._spent[_PLACES["sample"]] += spent.sample_s
        self._step = step, spent.work

    def turned(self) -> None:
        """The loop has turned: its step becomes a row, and the window closes when it is over."""
        if self._step is not None:
            self._append(*self._step)
            self._step = None
        if self._lapped_at >= self._window_began + WINDOW_S:  # just as `due` says it
            self._close()

    def due(self, wait: Phase) -> float:
        """When to turn again, so that a window ends that says what this wait means."""
        is_idle = self._step is None and self.log.num_rows == self._first_row
        if self._steady == wait and is_idle:
            return float("inf")
        return self._window_began + WINDOW_S

    def _append(self, step: Step, work: StepWork) -> None:
        times = [now - then for now, then in zip(self._spent, self._before_row, strict=True)]
        self._before_row = list(self._spent)
        self.log.append(
            (
                self._lapped_at,
                *times,
                step.num_prefill_tokens,
                step.num_decode_tokens,
                step.num_slots_used,
                step.num_slots_allowed,
                SLOT_LIMITS.index(step.limit),
                step.num_kv_blocks_used,
                work.num_bytes,
                work.num_flops,
            )
        )

    def _close(self) -> None:
        times = [now - then for now, then in zip(self._spent, self._before_window, strict=True)]
        window_s = self._lapped_at - self._window_began
        number = self.evidence.window + 1 if self.evidence is not None else 1
        rows = self.log.since(self._first_row)
        measured = evidence_of(rows, times, self.ceilings, self.weight_bytes)
        measured = dataclasses.replace(measured, window=number, window_s=window_s)
        evidence, roofs = raised(measured, self.ceilings, self.weight_bytes)
        if roofs != self.ceilings:
            self.ceilings = roofs
            self._on_raised(roofs)
        self.evidence = dataclasses.replace(evidence, bottleneck=classify(evidence))
        self._steady = None
        for wait in _WAITS:
            if times[_PLACES[wait]] >= _STEADY_SHARE * window_s:
                self._steady = wait
        self._before_window, self._window_began = list(self._spent), self._lapped_at
        self.closed_at = self._lapped_at
        self._first_row = self.log.num_rows


def evidence_of(
    rows: Rows, times: Sequence[float], ceilings: Ceilings, weight_bytes: int
) -> Evidence:
    """What the steps of a window add up to, whose phases took `times`, as PHASES has them.

    Once a window, not once a step: a step should not pay for it.
    """
    phases: dict[str, Any] = {
        f"{phase}_s": seconds for phase, seconds in zip(PHASES, times, strict=True)
    }
    summed: dict[str, Any] = {name: int(rows[name].sum()) for name in _SUMMED}
    forward_s = rows["forward_s"]
    limited_s = np.bincount(rows["slot_limit"], forward_s, len(SLOT_LIMITS)).tolist()
    limits: dict[str, Any] = {
        f"{limit}_s": seconds for limit, seconds in zip(SLOT_LIMITS, limited_s, strict=True)
    }
    memory_s = rows["num_bytes"] / ceilings.bytes_per_s
    compute_s = rows["num_flops"] / ceilings.flops_per_s
    worked_s = float(forward_s.sum())
    gain_s = float((forward_s * full_batch_gains(rows, ceilings, weight_bytes)).sum())
    return Evidence(
        num_steps=len(rows),
        **phases,
        **limits,
        **summed,
        full_batch_gain=gain_s / worked_s if worked_s else 1.0,
        num_kv_blocks_used=float(rows["num_kv_blocks_used"].mean()) if len(rows) else 0.0,
        memory_floor_s=float(memory_s.sum()),
        compute_floor_s=float(compute_s.sum()),
        floor_s=float(np.maximum(memory_s, compute_s).sum()),
    )


def full_batch_gains(rows: Rows, ceilings: Ceilings, weight_bytes: int) -> npt.NDArray[np.float64]:
    """Work per second by the roofs, of a full batch over each step's: 1 where it is full.

    Weights are read once however large the batch; KV and FLOPs grow with it.
    """
    used, allowed = rows["num_slots_used"], rows["num_slots_allowed"]
    times = np.where((used > 0) & (used < allowed), allowed / np.maximum(used, 1), 1.0)
    num_bytes, num_flops = rows["num_bytes"], rows["num_flops"]
    weights = np.minimum(weight_bytes, num_bytes)

    def floor_s(times: Any) -> npt.NDArray[np.float64]:
        moved_s = (weights + (num_bytes - weights) * times) / ceilings.bytes_per_s
        floors: npt.NDArray[np.float64] = np.maximum(
            moved_s, num_flops * times / ceilings.flops_per_s
        )
        return floors

    full_s = floor_s(times)
    return np.where(full_s > 0, times * floor_s(1.0) / np.where(full_s > 0, full_s, 1.0), 1.0)
