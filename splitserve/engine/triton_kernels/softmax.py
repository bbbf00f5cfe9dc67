"""One step of attention with an online softmax."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634  # scores times this are in units of log 2


@triton.jit
def absorb(
    scores: tl.tensor, values: tl.tensor, sums: tl.tensor, total: tl.tensor, high: tl.tensor
) -> tl.tensor:
    """Add some tokens to what queries have seen (Milakov, Gimelshein 2018; Dao et al. 2022).

    `scores` [queries, tokens] are in units of log 2, -inf where a query must not look; `values`
    are [tokens, head_dim]. `sums` [queries, head_dim] and `total` [queries] are weighted relative
    to 2 ** high. The first tokens must have one that each query may see, or NaN comes out.
    """
    new_high = tl.maximum(high, tl.max(scores, 1))
    weights = tl.exp2(scores - new_high[:, None])
    fade = tl.exp2(high - new_high)
    total = total * fade + tl.sum(weights, 1)
    seen = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return sums * fade[:, None] + seen, total, new_high
