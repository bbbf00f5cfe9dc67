"""A worker's own stopwatch: laps of its loop, one row a step, one Evidence a second.

    loop   wait │ receive │ schedule │ prepare forward sample │ send │ other │ wait …
    row         └──────────────────── one step ───────────────────────┘
    window ├────────────── about a second, whole turns ─────────────┤ ► Evidence

Laps follow each other without a hole, so phases add up to wall time. What no name fits is `other`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from splitserve.profiling.classify import classify
from splitserve.profiling.evidence import PHASES, SLOT_LIMITS, Evidence, Phase, SlotLimit
from splitserve.profiling.roofs import raised
from splitserve.profiling.step_log import StepLog
from splitserve.work import Ceilings, StepSpent, StepWork

WINDOW_S = 1.0
_PLACES = {phase: place for place, phase in enumerate(PHASES)}
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
        self._sums = _Sums()
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
        self._sums.add(step, spent, self.ceilings, self.weight_bytes)

    def turned(self) -> None:
        """The loop has turned: its step becomes a row, and the window closes when it is over."""
        if self._step is not None:
            self._append(*self._step)
            self._step = None
        if self._lapped_at >= self._window_began + WINDOW_S:  # just as `due` says it
            self._close()

    def due(self, wait: Phase) -> float:
        """When to turn again, so that a window ends that says what this wait means."""
        if self._steady == wait and not self._sums.num_steps:
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
        measured = self._sums.evidence(number, window_s, times)
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
        self._sums = _Sums()


@dataclass(slots=True)
class _Sums:
    """Of the steps of one window."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_slots_used: int = 0
    num_slots_allowed: int = 0
    num_kv_blocks_used: int = 0
    num_bytes: int = 0
    num_flops: int = 0
    floor_s: float = 0.0
    memory_floor_s: float = 0.0
    compute_floor_s: float = 0.0
    forward_s: float = 0.0
    gain_s: float = 0.0  # forward seconds times what a full batch would gain
    cap_s: float = 0.0
    no_request_s: float = 0.0
    no_blocks_s: float = 0.0
    waiting_for_kv_s: float = 0.0

    def add(self, step: Step, spent: StepSpent, ceilings: Ceilings, weight_bytes: int) -> None:
        work, forward_s = spent.work, spent.forward_s
        self.num_steps += 1
        self.num_prefill_tokens += step.num_prefill_tokens
        self.num_decode_tokens += step.num_decode_tokens
        self.num_slots_used += step.num_slots_used
        self.num_slots_allowed += step.num_slots_allowed
        self.num_kv_blocks_used += step.num_kv_blocks_used
        self.num_bytes += work.num_bytes
        self.num_flops += work.num_flops
        self.floor_s += work.floor_s(ceilings)
        self.memory_floor_s += work.num_bytes / ceilings.bytes_per_s
        self.compute_floor_s += work.num_flops / ceilings.flops_per_s
        self.forward_s += forward_s
        self.gain_s += forward_s * full_batch_gain(step, work, ceilings, weight_bytes)
        match step.limit:
            case "cap":
                self.cap_s += forward_s
            case "no_request":
                self.no_request_s += forward_s
            case "no_blocks":
                self.no_blocks_s += forward_s
            case "waiting_for_kv":
                self.waiting_for_kv_s += forward_s

    def evidence(self, number: int, window_s: float, times: list[float]) -> Evidence:
        steps = self.num_steps
        phases: dict[str, Any] = {
            f"{phase}_s": seconds for phase, seconds in zip(PHASES, times, strict=True)
        }
        return Evidence(
            window=number,
            window_s=window_s,
            num_steps=steps,
            **phases,
            num_prefill_tokens=self.num_prefill_tokens,
            num_decode_tokens=self.num_decode_tokens,
            num_slots_used=self.num_slots_used,
            num_slots_allowed=self.num_slots_allowed,
            cap_s=self.cap_s,
            no_request_s=self.no_request_s,
            no_blocks_s=self.no_blocks_s,
            waiting_for_kv_s=self.waiting_for_kv_s,
            full_batch_gain=self.gain_s / self.forward_s if self.forward_s else 1.0,
            num_kv_blocks_used=self.num_kv_blocks_used / steps if steps else 0.0,
            num_bytes=self.num_bytes,
            num_flops=self.num_flops,
            memory_floor_s=self.memory_floor_s,
            compute_floor_s=self.compute_floor_s,
            floor_s=self.floor_s,
        )


def full_batch_gain(step: Step, work: StepWork, ceilings: Ceilings, weight_bytes: int) -> float:
    """Work per second by the roofs, of a full batch over this one: 1 when it is full.

    Weights are read once however large the batch; KV and FLOPs grow with it.
    """
    if not step.num_slots_used or step.num_slots_used >= step.num_slots_allowed:
        return 1.0
    times = step.num_slots_allowed / step.num_slots_used
    weights = min(weight_bytes, work.num_bytes)
    full = StepWork(int(weights + (work.num_bytes - weights) * times), int(work.num_flops * times))
    floor_s, full_floor_s = work.floor_s(ceilings), full.floor_s(ceilings)
    return times * floor_s / full_floor_s if full_floor_s else 1.0
