"""Attention of rows with one query each over the paged cache, one part of a context a program."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.engine.attention.base import AttentionShape
from splitserve.engine.triton_kernels.paged import load_tokens
from splitserve.engine.triton_kernels.parts import (
    LEAST_PART_TOKENS,
    MOST_PARTS,
    PART_STEP,
    Partials,
    part_tokens,
)
from splitserve.engine.triton_kernels.precision import dot_dtype, padded
from splitserve.engine.triton_kernels.softmax import LOG2_E, absorb


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Where the rows' queries, results and KV are. int32, on the device."""

    token_rows: Tensor  # [num_rows]: which token of the batch each is
    context_lens: Tensor  # [num_rows], itself included; 0 for a row that pads: it gets zeros
    block_tables: Tensor  # [num_rows, most blocks]


@triton.jit(do_not_specialize=["table_width", "num_parts"])
def _decode_parts(  # noqa: PLR0913 - a kernel has no other way to be told
    query: tl.tensor,
    query_stride: tl.tensor,
    layer_kv: tl.tensor,
    value_offset: tl.tensor,
    token_rows: tl.tensor,
    context_lens: tl.tensor,
    block_tables: tl.tensor,
    table_width: tl.tensor,
    sums_out: tl.tensor,
    stats_out: tl.tensor,
    num_parts: tl.tensor,
    scale: tl.tensor,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    least: tl.constexpr,
    step: tl.constexpr,
    most_parts: tl.constexpr,
    padded_group: tl.constexpr,
    padded_dim: tl.constexpr,
    tile: tl.constexpr,
    dot_dtype: tl.constexpr,
) -> None:
    row, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(context_lens + row)
    size = part_tokens(context, least, step, most_parts)
    start = part * size
    if start >= context:
        return
    end = tl.minimum(start + size, context)

    members, dims = tl.arange(0, padded_group), tl.arange(0, padded_dim)
    heads = kv_head * group + members
    is_query = (members < group)[:, None] & (dims < head_dim)[None, :]
    token = tl.load(token_rows + row).to(tl.int64)
    query_places = token * query_stride + heads[:, None] * head_dim + dims[None, :]
    queries = tl.load(query + query_places, mask=is_query, other=0.0).to(dot_dtype)

    table = block_tables + row.to(tl.int64) * table_width
    keys = layer_kv + kv_head * head_dim
    sums = tl.zeros([padded_group, padded_dim], tl.float32)
    total = tl.zeros([padded_group], tl.float32)
    high = tl.full([padded_group], float("-inf"), tl.float32)
    for first in range(start, end, tile):
        tokens = first + tl.arange(0, tile)
        key, value = load_tokens(
            keys,
            value_offset,
            table,
            tokens,
            end,
            block_size,
            num_kv_heads * head_dim,
            head_dim,
            padded_dim,
            dot_dtype,
        )
        scores = tl.dot(queries, key, input_precision="ieee") * scale
        scores = tl.where((tokens < end)[None, :], scores, float("-inf"))
        sums, total, high = absorb(scores, value, sums, total, high)

    place = (row.to(tl.int64) * num_kv_heads * group + heads) * num_parts + part
    tl.store(sums_out + place[:, None] * head_dim + dims[None, :], sums, mask=is_query)
    tl.store(stats_out + place * 2, high, mask=members < group)
    tl.store(stats_out + place * 2 + 1, total, mask=members < group)


def decode_parts(
    query: Tensor, layer_kv: Tensor, rows: DecodeRows, shape: AttentionShape, partials: Partials
) -> None:
    """Attend with every part of every row; see merge.py for the rest.

    `query` and `layer_kv` are those of AttentionPlan.attend. `partials` has room for
    `most_parts` of the longest context.
    """
    assert query.stride()[1:] == (shape.head_dim, 1), "heads of a token are not contiguous"
    assert layer_kv.is_contiguous(), "a layer of the cache is not contiguous"
    num_parts = partials.sums.shape[2]
    grid = (len(rows.token_rows), shape.num_kv_heads, num_parts)
    _decode_parts[grid](
        query,
        query.stride(0),
        layer_kv,
        layer_kv.stride(0),
        rows.token_rows,
        rows.context_lens,
        rows.block_tables,
        rows.block_tables.shape[1],
        partials.sums,
        partials.stats,
        num_parts,
        shape.scale * LOG2_E,
        num_kv_heads=shape.num_kv_heads,
        group=shape.group_size,
        head_dim=shape.head_dim,
        block_size=layer_kv.shape[2],
        least=LEAST_PART_TOKENS,
        step=PART_STEP,
        most_parts=MOST_PARTS,
        padded_group=padded(shape.group_size),
        padded_dim=padded(shape.head_dim),
        tile=32 if query.dtype == torch.float32 or shape.head_dim > 128 else 64,
        dot_dtype=dot_dtype(query.dtype),
        num_warps=4,
        num_stages=2 if query.dtype == torch.float32 else 5,  # two tiles, and block ids ahead
    )
