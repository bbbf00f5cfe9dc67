"""What one forward pass is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.request import Sampling


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One token to draw: whose, under which rules, after which history."""

    sampling: Sampling
    seed: int
    choice_id: int
    num_prompt_tokens: int
    token_ids: Sequence[int]  # the whole history, prompt then output
