"""What a worker's throughput would become, from what its steps had to do and how long they took.

The model is Amdahl's law around a roofline. A remedy changes bytes, FLOPs, or the number of rows in
a step. The forward pass follows the ratio of the floors; host work stays the same for each step;
waits stay with the requests that caused them. Checked against benchmarks/engine_step.py: batches of
1 to 32 come out within a quarter of what was measured, on one thread and on two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from splitserve.profiling.classify import share, slot_limit
from splitserve.profiling.evidence import Evidence


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What a worker's evidence doesn't say: its settings, its roofs, and how many there are."""

    role: Literal["prefill", "decode"]
    num_prefill: int  # workers
    num_decode: int
    max_num_seqs: int
    max_num_batched_tokens: int
    weight_bytes: int
    weight_bytes_per_number: int  # 0 is not known
    kv_token_bytes: int
    kv_int8_token_bytes: int  # what that would be in int8, scales and all; 0 is not known
    bytes_per_s: float
    flops_per_s: float
    transport: str
    num_threads: int
    device: str = "cpu"
    num_spare_cores: int | None = None  # of the worker's host; None is not known

    @property
    def num_workers(self) -> int:
        """Of the worker's own pool."""
        return self.num_prefill if self.role == "prefill" else self.num_decode

    @property
    def int8_kv_ratio(self) -> float:
        """KV in int8 over KV as it is, in bytes; 1 where it would be no less, or is not known."""
        if not 0 < self.kv_int8_token_bytes < self.kv_token_bytes:
            return 1.0
        return self.kv_int8_token_bytes / self.kv_token_bytes


@dataclass(frozen=True, slots=True)
class StepFloor:
    """What an average step has to do, with the weights apart from what grows with the batch."""

    weight_bytes: float
    kv_bytes: float  # and whatever else grows with the batch
    flops: float

    def seconds(self, facts: PoolFacts, flops_ratio: float = 1.0) -> float:
        """At the roofs; with `flops_ratio` times the matmul peak."""
        return max(
            share(self.weight_bytes + self.kv_bytes, facts.bytes_per_s),
            share(self.flops, facts.flops_per_s * flops_ratio),
        )


def step_floor(evidence: Evidence, facts: PoolFacts) -> StepFloor:
    steps = max(1, evidence.num_steps)
    step_bytes = evidence.num_bytes / steps
    weight_bytes = min(float(facts.weight_bytes), step_bytes)
    return StepFloor(weight_bytes, step_bytes - weight_bytes, evidence.num_flops / steps)


def batch_size(evidence: Evidence) -> float:
    """Mean slots used in a step: sequences (decode) or tokens (prefill)."""
    return share(evidence.num_slots_used, evidence.num_steps)


def room(evidence: Evidence) -> float:
    """How many times as large batches may become before they meet their cap."""
    if slot_limit(evidence) == "cap" or not evidence.num_slots_used:
        return 1.0
    return at_least_one(evidence.num_slots_allowed / evidence.num_slots_used)


def forward_ratio(evidence: Evidence, facts: PoolFacts, times: float) -> float:
    """A forward pass with batches `times` as large, over one as they are."""
    now = step_floor(evidence, facts)
    then = StepFloor(now.weight_bytes, now.kv_bytes * times, now.flops * times)
    return at_least_one(share(then.seconds(facts), now.seconds(facts)))


def speedup_of_batches(evidence: Evidence, facts: PoolFacts, times: float) -> float:
    """Throughput when `times` as many requests are there, and batches `times` as large."""
    forward_s = evidence.forward_s * forward_ratio(evidence, facts, times)
    return at_least_one(times * speedup(evidence, evidence.forward_s - forward_s))


def speedup_of_forward(evidence: Evidence, ratio: float) -> float:
    """Throughput when forward passes take `ratio` of their time and nothing else changes."""
    return speedup(evidence, evidence.forward_s * (1 - min(1.0, ratio)))


def speedup(evidence: Evidence, saved_s: float) -> float:
    """Throughput when the same work takes so much less of the window; below 1 when it is more."""
    rest_s = evidence.window_s - saved_s
    return evidence.window_s / rest_s if rest_s > 0 else 1.0


def at_least_one(value: float) -> float:
    """No remedy promises a loss, nor what no number can say."""
    return value if math.isfinite(value) and value > 1 else 1.0
