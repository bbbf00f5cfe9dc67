"""Sharing a step's token budget among sequences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from splitserve.scheduling.sequence import Sequence


class Planned(NamedTuple):
    """Compute tokens [start, end) of a sequence in this step."""

    sequence: Sequence
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def samples(self) -> bool:
        """Whether the step ends with a token to draw."""
        return self.end == len(self.sequence.token_ids)


def plan_chunks(sequences: Iterable[Sequence], budget: int) -> list[Planned]:
    """Chunks in the given order until `budget` tokens are spent; the last one may be cut."""
    plan: list[Planned] = []
    for sequence in sequences:
        if budget <= 0:
            break
        start = sequence.num_computed
        end = min(len(sequence.token_ids), start + budget)
        if end > start:
            plan.append(Planned(sequence, start, end))
            budget -= end - start
    return plan
