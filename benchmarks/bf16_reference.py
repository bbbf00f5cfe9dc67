"""bfloat16 by logits: this engine's and transformers', both against transformers in float32.

    python -m benchmarks.bf16_reference [--prompts 200]

The varied prompts of tests/reference, each with the answer of float32. The logits from which each
token of that answer would be drawn: here, the prompt is computed at once and the answer as decode
rows; by transformers, all in one pass.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.engine_step import chunk_of
from benchmarks.quality import FORMATS, load
from splitserve.engine.model_runner import ModelRunner
from splitserve.models import resolve_model
from tests.reference import THIN_MARGIN, Case, prose_cases
from tests.reference.make_reference import MAX_PROMPT_TOKENS, MODEL, NUM_PROSE_TOKENS

CACHE_TOKENS = MAX_PROMPT_TOKENS + NUM_PROSE_TOKENS


@dataclass(slots=True)
class Distance:
    """Of some logits from others, over rows [vocab]; `lost_margins` has for each row whose
    likeliest token is another one by how much it was the likeliest in the others."""

    largest: float = 0.0
    num_rows: int = 0
    lost_margins: list[float] = field(default_factory=list)
    _sum_of_means: float = 0.0

    @property
    def mean(self) -> float:
        return self._sum_of_means / self.num_rows

    def add(self, found: Tensor, others: Tensor) -> None:
        """Both [rows, vocab]."""
        apart = (found - others).abs()
        self.largest = max(self.largest, float(apart.max()))
        self.num_rows += len(found)
        self._sum_of_means += float(apart.mean(-1).sum())
        best = others.topk(2).values
        lost = found.argmax(-1) != others.argmax(-1)
        self.lost_margins += (best[:, 0] - best[:, 1])[lost].tolist()

    def __str__(self) -> str:
        num_lost = len(self.lost_margins)
        num_clear = sum(margin > THIN_MARGIN for margin in self.lost_margins)
        return (
            f"{self.largest:.3f} | {self.mean:.4f} | {1 - num_lost / self.num_rows:.2%}"
            f" | {num_clear} | {max(self.lost_margins, default=0.0):.3f}"
        )


@dataclass(frozen=True, slots=True)
class Distances:
    """What is measured of some prompts."""

    ours: Distance = field(default_factory=Distance)  # from float32
    transformers: Distance = field(default_factory=Distance)  # in bfloat16, from float32
    between: Distance = field(default_factory=Distance)  # ours from transformers', in bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=200)
    args = parser.parse_args()
    directory = resolve_model(MODEL).directory
    runner = load(directory, FORMATS["bfloat16"], CACHE_TOKENS)
    found = measure(runner, directory, prose_cases()[: args.prompts])
    print(f"{found.ours.num_rows} rows of logits, {args.prompts} prompts\n")
    print("| | largest | mean | same likeliest | clear ones lost | by at most |")
    print("| --- | --- | --- | --- | --- | --- |")
    print(f"| this engine, from float32 | {found.ours} |")
    print(f"| transformers in bfloat16, from float32 | {found.transformers} |")
    print(f"| this engine, from transformers in bfloat16 | {found.between} |")


def measure(runner: ModelRunner, directory: Path, cases: Iterable[Case]) -> Distances:
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    found = Distances()
    for case in cases:
        token_ids = [*case.prompt_ids, *case.token_ids[:-1]]
        ours = forced(runner, token_ids, len(case.prompt_ids))
        with torch.inference_mode():
            true, theirs = (
                model(torch.tensor([token_ids]), logits_to_keep=len(ours)).logits[0].float()
                for model in (exact, rounded)
            )
        found.ours.add(ours, true)
        found.transformers.add(theirs, true)
        found.between.add(ours, theirs)
    return found


def forced(runner: ModelRunner, token_ids: list[int], num_prompt_tokens: int) -> Tensor:
    """Logits [tokens, vocab] behind the prompt, computed at once, and each token after it.

    Those are decode rows of one batch: all of a batch's KV is written before any of it is read.
    """
    blocks = range(-(-len(token_ids) // runner.layout.block_size))
    ends = range(num_prompt_tokens + 1, len(token_ids) + 1)
    prompt = runner.logits([chunk_of(token_ids[:num_prompt_tokens], 0, blocks)])
    behind = runner.logits([chunk_of(token_ids[:end], end - 1, blocks) for end in ends])
    return torch.cat([prompt, behind]).float()


if __name__ == "__main__":
    main()
