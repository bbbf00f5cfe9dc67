"""How a long context is cut into parts for decode, and what each part leaves for the merge.

A part is at least 128 tokens, and longer where a context would have more than 64 of them. The cut
is a function of the row's own context alone. ("Flash-Decoding", Dao et al. 2023, splits by how
many programs a batch has; a row's rounding would then depend on its batch-mates.)

    context   1..128   129..256   ...   8192   8193       ...   131072
    parts     1        2                64     43 of 192        64 of 2048
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LEAST_PART_TOKENS, PART_STEP, MOST_PARTS = 128, 64, 64


def most_parts(most_tokens: int) -> int:
    """The most parts that any context of up to so many tokens has."""
    return max(1, min(MOST_PARTS, -(-most_tokens // LEAST_PART_TOKENS)))


@triton.jit
def part_tokens(
    context: tl.tensor, least: tl.constexpr, step: tl.constexpr, most_parts: tl.constexpr
) -> tl.tensor:
    """Tokens in each part of a context; the last one may have fewer."""
    even = tl.cdiv(context, most_parts)
    return tl.maximum(least, tl.cdiv(even, step) * step)


@dataclass(frozen=True, slots=True)
class Partials:
    """Owns what parts leave: f32, unwritten for parts that a row does not have.

    `sums` [num_rows, num_heads, num_parts, head_dim] are values weighted relative to 2 ** high;
    `stats` [num_rows, num_heads, num_parts, 2] are the high score and the sum of the weights.
    """

    sums: Tensor
    stats: Tensor

    @classmethod
    def allocate(
        cls, num_rows: int, num_parts: int, num_heads: int, head_dim: int, device: torch.device
    ) -> Partials:
        size = (num_rows, num_heads, num_parts)
        sums = torch.empty(*size, head_dim, dtype=torch.float32, device=device)
        return cls(sums, torch.empty(*size, 2, dtype=torch.float32, device=device))
