"""What rounding costs: every number format of the engine against f32, over a text.

    python -m benchmarks.quality [--model smollm2-135m] [--text FILE] [--window 1024]

Teacher-forced over the text: perplexity, how often the likeliest token is f32's, and the mean
divergence KL(f32 || format) of the next token's distribution. Free-running from 32 places of the
text, greedily: of 32 tokens, how many come before the first that differs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from splitserve.config import EngineConfig
from splitserve.engine.batch import Chunk, SampleRow
from splitserve.engine.model_runner import ModelRunner
from splitserve.models import resolve_model
from splitserve.request import Sampling
from splitserve.tokenizer import Tokenizer

TEXT = Path(__file__).parents[1] / "tests" / "reference" / "prose.txt"
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 weights": {"dtype": "bfloat16", "quantization": "int8"},
    "int8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8 weights and KV": {
        "dtype": "bfloat16",
        "quantization": "int8",
        "kv_cache_dtype": "int8",
    },
}
ROWS = 128  # of logits at once
NUM_STARTS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64, 32
GREEDY = Sampling(max_tokens=1 << 20)


@dataclass(frozen=True, slots=True)
class Quality:
    """Of one format. `likeliest` [tokens] and `answers` are what others are compared with."""

    perplexity: float
    divergence: float
    likeliest: Tensor
    answers: list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--window", type=int, default=1024, help="tokens that see each other")
    args = parser.parse_args()
    directory = resolve_model(args.model).directory
    token_ids = list(Tokenizer(directory).encode(args.text.read_text(encoding="utf-8")))
    windows = [token_ids[i : i + args.window] for i in range(0, len(token_ids), args.window)]
    windows = [window for window in windows if len(window) > 1]
    exact = load(directory, FORMATS["float32"], args.window)
    print(f"{args.model}, {len(token_ids)} tokens of {args.text.name}, windows of {args.window}\n")
    print("| | perplexity | over f32 | same likeliest | KL, nats | same answer for |")
    print("|---|---|---|---|---|---|")
    baseline: Quality | None = None
    for name, options in FORMATS.items():
        quality = measure(load(directory, options, args.window), exact, windows, token_ids)
        baseline = baseline or quality
        print(f"| {name} | {row(quality, baseline)} |", flush=True)


def load(directory: Path, options: dict[str, Any], window: int) -> ModelRunner:
    num_blocks = max(window, PROMPT_TOKENS + OUTPUT_TOKENS) // 16 + 1
    return ModelRunner.load(EngineConfig(str(directory), num_blocks=num_blocks, **options))


def measure(
    runner: ModelRunner, exact: ModelRunner, windows: list[list[int]], token_ids: list[int]
) -> Quality:
    loss, divergence, likeliest = 0.0, 0.0, []
    for window in windows:
        for (start, logits), (_, others) in zip(
            forced(runner, window), forced(exact, window), strict=True
        ):
            following = torch.tensor(window[start + 1 : start + 1 + len(logits)])
            logits, others = logits[: len(following)], others[: len(following)]
            loss -= float(logits.gather(1, following[:, None]).sum())
            divergence += float((others.exp() * (others - logits)).sum())
            likeliest.append(logits.argmax(-1))
    num_tokens = sum(len(part) for part in likeliest)
    starts = range(0, len(token_ids) - PROMPT_TOKENS, len(token_ids) // NUM_STARTS)
    answers = [answer(runner, token_ids[i : i + PROMPT_TOKENS]) for i in starts]
    return Quality(
        math.exp(loss / num_tokens), divergence / num_tokens, torch.cat(likeliest), answers
    )


def forced(runner: ModelRunner, token_ids: list[int]) -> Iterator[tuple[int, Tensor]]:
    """Log probabilities [tokens, vocab] behind every token, some at a time, and the first's place.

    Tokens of one sequence are chunks of their own in one batch: all of a batch's KV is written
    before any of it is read.
    """
    blocks = range(-(-len(token_ids) // runner.layout.block_size))
    sample = (SampleRow(GREEDY, 0, 0, len(token_ids), token_ids),)
    for start in range(0, len(token_ids), ROWS):
        end = min(start + ROWS, len(token_ids))
        chunks = [Chunk(token_ids, i, i + 1, blocks, sample) for i in range(start, end)]
        yield start, runner.logits(chunks).float().log_softmax(-1)


def answer(runner: ModelRunner, prompt: list[int]) -> list[int]:
    history, start = list(prompt), 0
    blocks = range(-(-(len(prompt) + OUTPUT_TOKENS) // runner.layout.block_size))
    while len(history) < len(prompt) + OUTPUT_TOKENS:
        sample = (SampleRow(GREEDY, 0, 0, len(prompt), history),)
        [[token]] = runner.step([Chunk(history, start, len(history), blocks, sample)])
        start = len(history)
        history.append(token.token_id)
    return history[len(prompt) :]


def row(quality: Quality, exact: Quality) -> str:
    same = float((quality.likeliest == exact.likeliest).float().mean())
    lengths = [
        next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), len(mine))
        for mine, theirs in zip(quality.answers, exact.answers, strict=True)
    ]
    mean = sum(lengths) / len(lengths)
    return (
        f"{quality.perplexity:.3f} | {quality.perplexity / exact.perplexity:.4f} | {same:.2%}"
        f" | {quality.divergence:.5f} | {mean:.1f} of {OUTPUT_TOKENS} tokens"
    )


if __name__ == "__main__":
    main()
