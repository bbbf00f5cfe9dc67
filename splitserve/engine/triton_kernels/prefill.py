"""Causal attention of prefill chunks over the paged cache, one tile of queries a program.

Tiles of queries are cut chunk by chunk, so a token's numbers depend on its chunk alone. Keys come
in tiles too; only those at the diagonal need a mask ("FlashAttention-2", Dao 2023):

    keys        0 .. 63   64 .. 127   128 .. 191
    queries 40 .. 103     [ masked ]  [ masked ]
    queries 104 .. 167    [  all   ]  [ masked ]  [ masked ]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.engine.attention.base import AttentionShape
from splitserve.engine.batch import Batch, Ints
from splitserve.engine.triton_kernels.paged import load_tokens
from splitserve.engine.triton_kernels.precision import dot_dtype, padded
from splitserve.engine.triton_kernels.softmax import LOG2_E, absorb

_TWO_TILES_BYTES = 136_000


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Which queries each program takes. int32, on the device."""

    # [num_tiles, 4]: row of the block table, first token of the batch, number of queries, and the
    # position of the first one in its sequence.
    tiles: Tensor
    block_tables: Tensor  # [num_seqs, most blocks]


def cut_into_tiles(batch: Batch, seqs: Ints, num_queries: int) -> Ints:
    """The tiles of some sequences of a batch, as in PrefillTiles. Those that take longest first."""
    query_lens = batch.query_lens[seqs]
    num_tiles = -(-query_lens // num_queries)
    rows = np.repeat(np.arange(len(seqs)), num_tiles)
    skipped = (np.arange(len(rows)) - (np.cumsum(num_tiles) - num_tiles)[rows]) * num_queries
    tiles = np.stack(
        (
            rows,
            batch.query_starts[seqs][rows] + skipped,
            np.minimum(query_lens[rows] - skipped, num_queries),
            (batch.context_lens[seqs] - query_lens)[rows] + skipped,
        ),
        1,
    )
    longest_first: Ints = tiles[np.argsort(-tiles[:, 3], kind="stable")]
    return longest_first


def tile_queries(dtype: torch.dtype, head_dim: int) -> int:
    """Queries in a tile, for a model of this dtype."""
    if dtype == torch.float32:
        return 32
    return 128 if head_dim <= 128 else 64


@triton.jit(do_not_specialize=["table_width"])
def _prefill(  # noqa: PLR0913 - a kernel has no other way to be told
    query: tl.tensor,
    query_stride: tl.tensor,
    layer_kv: tl.tensor,
    value_offset: tl.tensor,
    tiles: tl.tensor,
    block_tables: tl.tensor,
    table_width: tl.tensor,
    output: tl.tensor,
    scale: tl.tensor,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    padded_dim: tl.constexpr,
    num_queries: tl.constexpr,
    tile: tl.constexpr,
    dot_dtype: tl.constexpr,
) -> None:
    head, program = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tiles + program * 4)
    token = tl.load(tiles + program * 4 + 1).to(tl.int64)
    count = tl.load(tiles + program * 4 + 2)
    position = tl.load(tiles + program * 4 + 3)

    places, dims = tl.arange(0, num_queries), tl.arange(0, padded_dim)
    is_query = (places < count)[:, None] & (dims < head_dim)[None, :]
    query_places = (token + places)[:, None] * query_stride + head * head_dim + dims[None, :]
    queries = tl.load(query + query_places, mask=is_query, other=0.0).to(dot_dtype)

    table = block_tables + seq.to(tl.int64) * table_width
    keys = layer_kv + head // (num_heads // num_kv_heads) * head_dim
    sums = tl.zeros([num_queries, padded_dim], tl.float32)
    total = tl.zeros([num_queries], tl.float32)
    high = tl.full([num_queries], float("-inf"), tl.float32)
    diagonal = (position + 1) // tile * tile  # before it, every query sees every token
    end = position + count
    for first in range(0, diagonal, tile):
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
        sums, total, high = absorb(scores, value, sums, total, high)
    for first in range(diagonal, end, tile):
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
        seen = tokens[None, :] <= (position + places)[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        sums, total, high = absorb(scores, value, sums, total, high)

    result = (sums / total[:, None]).to(output.dtype.element_ty)
    output_places = ((token + places)[:, None] * num_heads + head) * head_dim + dims[None, :]
    tl.store(output + output_places, result, mask=is_query)


def prefill(
    query: Tensor, layer_kv: Tensor, tiles: PrefillTiles, shape: AttentionShape, output: Tensor
) -> None:
    """Write the chunks' results into `output`, [num_tokens, num_heads * head_dim], contiguous.

    `query` and `layer_kv` are those of AttentionPlan.attend.
    """
    assert query.stride()[1:] == (shape.head_dim, 1), "heads of a token are not contiguous"
    assert layer_kv.is_contiguous(), "a layer of the cache is not contiguous"
    assert output.is_contiguous() and output.shape[1] == shape.num_heads * shape.head_dim
    exact = query.dtype == torch.float32
    _prefill[(shape.num_heads, len(tiles.tiles))](
        query,
        query.stride(0),
        layer_kv,
        layer_kv.stride(0),
        tiles.tiles,
        tiles.block_tables,
        tiles.block_tables.shape[1],
        output,
        shape.scale * LOG2_E,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=layer_kv.shape[2],
        padded_dim=padded(shape.head_dim),
        num_queries=tile_queries(query.dtype, shape.head_dim),
        tile=(32 if exact else 64) // (1 if shape.head_dim <= 128 else 2),
        dot_dtype=dot_dtype(query.dtype),
        num_warps=4 if exact else 8,
        num_stages=2 if exact else _num_stages(query.device),
    )


def _num_stages(device: torch.device) -> int:
    """How deep loads are pipelined. Block ids take stages too: 5 keep two tiles of keys, 3 one.

    Two take 132 KB of shared memory with heads of 128, which is more than some GPUs have.
    """
    if device.type != "cuda":
        return 5
    have = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return 5 if have > _TWO_TILES_BYTES else 3
