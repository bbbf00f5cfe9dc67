"""Steps of some prompts, for the same model computed in two ways."""

from __future__ import annotations

import itertools

from splitserve.engine.batch import Chunk
from tests.unit.engine.sequences import Prompts, chunk

NUM_BLOCKS = 80


def single_rows(count: int) -> list[Chunk]:
    prompts = Prompts(NUM_BLOCKS)
    return [chunk(prompts.token_ids(1), 0, 1, prompts.blocks(1)) for _ in range(count)]


def mixed_steps() -> tuple[dict[int, list[int]], list[list[Chunk]]]:
    """Histories by their lengths, and steps: chunks, decode rows beside chunks, decode rows."""
    prompts = Prompts(NUM_BLOCKS)
    paces = {90: (40, 47, 1, 1, 1), 33: (31, 1, 1), 20: (17, 1, 1, 1)}
    histories = {length: prompts.token_ids(length) for length in paces}
    blocks = {length: prompts.blocks(length) for length in paces}
    done = dict.fromkeys(paces, 0)
    steps = []
    for sizes in itertools.zip_longest(*paces.values(), fillvalue=0):
        chunks = []
        for length, size in zip(paces, sizes, strict=True):
            if size:
                start, done[length] = done[length], done[length] + size
                chunks.append(chunk(histories[length], start, done[length], blocks[length]))
        steps.append(chunks)
    assert list(done) == list(done.values())
    return histories, steps
