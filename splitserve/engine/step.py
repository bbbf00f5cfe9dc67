"""From a scheduler's plan to the engine's input, and one step of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from splitserve.engine.batch import Chunk, SampleRow
from splitserve.request import SampledToken
from splitserve.scheduling.chunking import Planned

if TYPE_CHECKING:  # schedulers and loops need no torch
    from splitserve.engine.model_runner import ModelRunner

log = logging.getLogger(__name__)


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


def compute(runner: ModelRunner, plan: list[Planned]) -> list[tuple[SampledToken, ...] | str]:
    """One forward pass over the plan: for each chunk its tokens, or why it failed.

    When the batch fails, each chunk is computed alone, so that one request can't take others with
    it. That is safe: a chunk writes the same KV again, and drawing a token has no memory.
    """
    try:
        return list(runner.step([chunk_of(planned) for planned in plan]))
    except Exception as error:
        log.exception("a forward pass over %d chunks failed", len(plan))
        if len(plan) == 1:
            return [f"{type(error).__name__}: {error}"]
    return [result for planned in plan for result in compute(runner, [planned])]
