"""One remedy, and the kinds of arithmetic that predict what it gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from splitserve.profiling.classify import share
from splitserve.profiling.evidence import Evidence
from splitserve.profiling.predictions import (
    PoolFacts,
    StepFloor,
    at_least_one,
    forward_ratio,
    room,
    speedup,
    speedup_of_batches,
    speedup_of_forward,
    step_floor,
)

# How many wait for their KV is not recorded. One for each that runs is a cautious guess.
JOINED_BY_WAITING = 2.0

AppliesTo = Literal["prefill", "decode", "both"]


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change, what it should give, and why."""

    title: str
    speedup: float  # finite, at least 1; of tokens/s, `arithmetic` says whose
    arithmetic: str
    applies_to: AppliesTo


@dataclass(frozen=True, slots=True)
class Case:
    """Owns what is known of one worker, and makes remedies out of it."""

    evidence: Evidence
    facts: PoolFacts

    def batches(self, title: str, times: float, why: str) -> Remedy:
        """Batches `times` as large: weights are read, and host work is done, once for all of it."""
        e = self.evidence
        ratio = forward_ratio(e, self.facts, times)
        gain = speedup_of_batches(e, self.facts, times)
        turn_ms = 1e3 * share(e.window_s, e.num_steps)
        longer_ms = turn_ms + 1e3 * share(e.forward_s, e.num_steps) * (ratio - 1)
        text = (
            f"{why}; forward takes {ratio:.2f} times as long, the rest of a step as long as now:"
            f" {times:.2f} x {turn_ms:.1f} ms / {longer_ms:.1f} ms a step"
        )
        return self.made(title, gain, text)

    def less_time(self, title: str, saved_s: float, why: str) -> Remedy:
        """The same work in a window that is shorter by `saved_s`."""
        e = self.evidence
        text = f"{why}: 1 / (1 - {share(saved_s, e.window_s):.2f})"
        return self.made(title, speedup(e, saved_s), text)

    def lower_floor(
        self, title: str, floor: StepFloor, why: str, flops_ratio: float = 1.0
    ) -> Remedy:
        """A forward pass that has less to do, as far from its floor as now."""
        now_s = step_floor(self.evidence, self.facts).seconds(self.facts)
        then_s = floor.seconds(self.facts, flops_ratio)
        ratio = share(then_s, now_s) if now_s else 1.0
        gain = speedup_of_forward(self.evidence, ratio)
        saved = share(self.evidence.forward_s, self.evidence.window_s) * (1 - min(1.0, ratio))
        text = (
            f"{why}; the floor of a step falls from {1e3 * now_s:.2f} to {1e3 * then_s:.2f} ms, and"
            f" forward, {self.of_window(self.evidence.forward_s)}, with it: 1 / (1 - {saved:.2f})"
        )
        return self.made(title, gain, text)

    def sooner(self, title: str, times: float) -> Remedy:
        """KV that arrives `times` as fast: shorter gaps, and batches that fill earlier."""
        e, less = self.evidence, 1 - 1 / times
        joined = min(JOINED_BY_WAITING, room(e))
        fuller = speedup_of_batches(e, self.facts, joined)
        in_batches = 1 + share(e.waiting_for_kv_s, e.window_s) * less * (fuller - 1)
        gain = speedup(e, e.kv_wait_s * less) * in_batches
        text = f"KV on its way for 1 / {times:g} of the time"
        if e.kv_wait_s:
            saved = share(e.kv_wait_s * less, e.window_s)
            text += f"; gaps, {self.of_window(e.kv_wait_s)}, shrink alike: 1 / (1 - {saved:.2f})"
        if in_batches > 1:
            text += (
                f"; in {self.of_window(e.waiting_for_kv_s * less)} batches are {joined:.2f} times"
                f" as large and do {fuller:.2f} times the work"
            )
        return self.made(title, gain, text, "both")

    def made(
        self, title: str, gain: float, text: str, applies_to: AppliesTo | None = None
    ) -> Remedy:
        gain = at_least_one(gain)
        of = f" = {gain:.2f} times this worker's tokens/s"
        return Remedy(title, gain, text + of, applies_to or self.facts.role)

    def of_window(self, seconds: float) -> str:
        return f"{100 * share(seconds, self.evidence.window_s):.0f} % of the window"
