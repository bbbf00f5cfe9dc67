"""Keys and values of some tokens, from a paged cache."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tokens(  # noqa: PLR0913 - a kernel has no other way to be told
    keys: tl.tensor,
    value_offset: tl.tensor,
    table: tl.tensor,
    tokens: tl.tensor,
    end: tl.tensor,
    block_size: tl.constexpr,
    token_size: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Keys [padded_dim, tokens] and values [tokens, padded_dim] of one head.

    `keys` points to the head's first key in a layer, `table` to the sequence's block ids;
    `token_size` is num_kv_heads * head_dim. Tokens from `end` on are zeros: what lies in unused
    places, which may be NaN, is not read.
    """
    dims = tl.arange(0, padded_dim)
    is_dim = dims < head_dim
    inside = tokens < end
    blocks = tl.load(table + tokens // block_size, mask=inside, other=0).to(tl.int64)
    places = (blocks * block_size + tokens % block_size) * token_size
    key = tl.load(
        keys + places[None, :] + dims[:, None], mask=is_dim[:, None] & inside[None, :], other=0.0
    )
    value = tl.load(
        keys + value_offset + places[:, None] + dims[None, :],
        mask=inside[:, None] & is_dim[None, :],
        other=0.0,
    )
    return key.to(dtype), value.to(dtype)
