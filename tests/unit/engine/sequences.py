"""Random prompts, and chunks of them with blocks that belong to nobody else."""

from __future__ import annotations

import random
from collections.abc import Sequence

from splitserve.engine.batch import Chunk, SampleRow
from splitserve.request import Sampling

GREEDY = Sampling(max_tokens=64)
BLOCK_SIZE = 16


class Prompts:
    """Prompts over a pool of blocks, each with scattered blocks of its own."""

    def __init__(self, num_blocks: int, block_size: int = BLOCK_SIZE, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._block_size = block_size
        self._free = list(range(num_blocks))
        self._rng.shuffle(self._free)

    def token_ids(self, length: int) -> list[int]:
        return [self._rng.randrange(256) for _ in range(length)]

    def blocks(self, num_tokens: int) -> list[int]:
        needed = -(-num_tokens // self._block_size)
        taken, self._free = self._free[:needed], self._free[needed:]
        assert len(taken) == needed, "the pool is too small for this test"
        return taken


def chunk(token_ids: Sequence[int], start: int, end: int, blocks: Sequence[int]) -> Chunk:
    """A chunk that asks for one greedy token."""
    return Chunk(token_ids, start, end, blocks, (row(token_ids),))


def row(token_ids: Sequence[int], choice_id: int = 0) -> SampleRow:
    return SampleRow(GREEDY, 7, choice_id, len(token_ids), token_ids)
