"""From a scheduler's plan to the engine's input."""

from __future__ import annotations

from splitserve.engine.batch import Chunk, SampleRow
from splitserve.scheduling.chunking import Planned


def chunk_of(planned: Planned) -> Chunk:
    """The chunk, with a row to sample for each choice when it ends its sequence."""
    sequence = planned.sequence
    rows: tuple[SampleRow, ...] = ()
    if planned.samples:
        rows = tuple(
            SampleRow(
                sequence.request.sampling,
                choice.seed,
                choice.choice_id,
                sequence.request.num_prompt_tokens,
                sequence.token_ids,
            )
            for choice in sequence.choices
        )
    return Chunk(sequence.token_ids, planned.start, planned.end, sequence.block_ids, rows)
