"""Attention by Triton kernels: decode rows by parts and a merge, prefill chunks by tiles.

A plan sends everything the kernels have to know to the device in one copy. For a CUDA graph of
decode steps, `decode_plan` is made over tensors that stay where they are.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from splitserve.engine.attention.base import AttentionBackend, AttentionPlan, AttentionShape
from splitserve.engine.batch import Batch
from splitserve.engine.packing import to_device
from splitserve.engine.triton_kernels.decode import DecodeRows, decode_parts
from splitserve.engine.triton_kernels.merge import merge_parts
from splitserve.engine.triton_kernels.parts import Partials, most_parts
from splitserve.engine.triton_kernels.prefill import (
    PrefillTiles,
    cut_into_tiles,
    prefill,
    tile_queries,
)


class TritonAttention(AttentionBackend):
    """Plans batches for the device that their tensors are on."""

    def __init__(self, shape: AttentionShape, dtype: torch.dtype) -> None:
        self._shape, self.dtype = shape, dtype
        self._tile_queries = tile_queries(dtype, shape.head_dim)

    def plan(self, batch: Batch) -> AttentionPlan:
        single = batch.query_lens == 1
        decode, chunked = np.flatnonzero(single), np.flatnonzero(~single)
        token_rows, context_lens, decode_tables, tiles, prefill_tables = to_device(
            (
                batch.query_starts[decode],
                batch.context_lens[decode],
                batch.block_tables[decode],
                cut_into_tiles(batch, chunked, self._tile_queries),
                batch.block_tables[chunked],
            ),
            batch.positions.device,
        )
        rows = DecodeRows(token_rows, context_lens, decode_tables) if len(decode) else None
        longest = int(batch.context_lens[decode].max()) if len(decode) else 0
        return _TritonPlan(
            self._shape,
            rows,
            _partials(self._shape, rows, longest) if rows else None,
            PrefillTiles(tiles, prefill_tables) if len(chunked) else None,
        )

    def decode_plan(self, rows: DecodeRows, most_tokens: int) -> AttentionPlan:
        """For decode rows alone, each of up to `most_tokens` of context: what is in `rows` may
        change between uses. A row that pads, whose context is 0, comes out as zeros."""
        return _TritonPlan(self._shape, rows, _partials(self._shape, rows, most_tokens), None)


class _TritonPlan(AttentionPlan):
    def __init__(
        self,
        shape: AttentionShape,
        rows: DecodeRows | None,
        partials: Partials | None,
        tiles: PrefillTiles | None,
    ) -> None:
        self._shape = shape
        self._rows, self._partials = rows, partials
        self._tiles = tiles

    def attend(self, query: Tensor, layer_kv: Tensor) -> Tensor:
        output = query.new_empty(len(query), self._shape.num_heads * self._shape.head_dim)
        if self._tiles is not None:
            prefill(query, layer_kv, self._tiles, self._shape, output)
        if self._rows is not None and self._partials is not None:
            decode_parts(query, layer_kv, self._rows, self._shape, self._partials)
            merge_parts(self._partials, self._rows, output)
        return output


def _partials(shape: AttentionShape, rows: DecodeRows, most_tokens: int) -> Partials:
    num_rows, device = len(rows.token_rows), rows.token_rows.device
    num_parts = most_parts(most_tokens)
    return Partials.allocate(num_rows, num_parts, shape.num_heads, shape.head_dim, device)
