"""What a tiny model answers, computed by transformers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def greedy(model: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The likeliest continuation, through EOS."""
    return greedy_all(model, [prompt], num_tokens)[0]


def greedy_all(model: Path, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """The same for several prompts, in one batch without a KV cache.

    What is behind the end of a prompt is not seen by it, since attention looks back only.
    """
    ends = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.zeros(len(prompts), int(ends.max()) + num_tokens, dtype=torch.long)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    every = torch.arange(len(prompts))
    with torch.inference_mode():
        for step in range(num_tokens):
            seen = ids[:, : int(ends.max()) + step]
            logits = _loaded(model)(seen, use_cache=False).logits
            ids[every, ends + step] = logits[every, ends + step - 1].argmax(-1)
    return [row[end : end + num_tokens].tolist() for row, end in zip(ids, ends, strict=True)]


@functools.cache
def _loaded(model: Path) -> torch.nn.Module:
    loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return loaded
