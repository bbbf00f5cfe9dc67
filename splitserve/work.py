"""How much a step had to do, how long it took, and what the machine could have done at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The two roofs of a worker: measured on its device, in its dtype, with its threads."""

    bytes_per_s: float  # of a copy: bytes read plus bytes written
    flops_per_s: float  # of a large matmul; a multiply and an add are two

    def highest(self, other: Ceilings) -> Ceilings:
        """The better of each."""
        return Ceilings(
            max(self.bytes_per_s, other.bytes_per_s), max(self.flops_per_s, other.flops_per_s)
        )


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a forward pass can't do without."""

    num_bytes: int = 0  # weights once, KV read and written
    num_flops: int = 0

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(self.num_bytes + other.num_bytes, self.num_flops + other.num_flops)

    def floor_s(self, ceilings: Ceilings) -> float:
        """No machine with these roofs does it in less."""
        return max(self.num_bytes / ceilings.bytes_per_s, self.num_flops / ceilings.flops_per_s)


@dataclass(frozen=True, slots=True)
class StepSpent:
    """Where the time of a runner's step went, and what it had to do."""

    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    work: StepWork = StepWork()


class Operation(NamedTuple):
    """One operation of a step, as a profiler saw it; others may run within it."""

    name: str
    started_at: float  # on the process's monotonic clock, s
    duration_s: float
