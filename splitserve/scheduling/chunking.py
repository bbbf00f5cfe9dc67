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
    """Chunks of at most `budget` tokens together, in the given order: oldest first.

    What is nearest to its end goes first (answers, then short prompts; of equals the oldest), so
    that nobody waits behind one huge prompt. The oldest prompt has half of what answers leave, so
    that it ends too. The last chunk may be cut.
    """
    waiting = [s for s in sequences if s.num_uncomputed > 0]
    oldest = next((s for s in waiting if s.num_uncomputed > 1), None)
    num_answers = sum(s.num_uncomputed == 1 for s in waiting)
    kept = 0
    if oldest is not None:
        kept = min(oldest.num_uncomputed, (max(budget - num_answers, 0) + 1) // 2)
    shares: dict[int, int] = {}  # by id(sequence): they have no other name
    for sequence in sorted(waiting, key=lambda s: s.num_uncomputed):
        if sequence is oldest:
            kept = 0
        shares[id(sequence)] = min(sequence.num_uncomputed, max(budget - kept, 0))
        budget -= shares[id(sequence)]
    return [
        Planned(s, s.num_computed, s.num_computed + shares[id(s)]) for s in waiting if shares[id(s)]
    ]
