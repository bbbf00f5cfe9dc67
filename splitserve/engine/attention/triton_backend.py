"""Attention by Triton kernels: decode rows by parts and a merge, prefill chunks by tiles.

A plan sends everything the kernels have to know to the device in one copy. For a CUDA graph of
decode steps there is a plan whose tensors stay where they are (`StaticDecodePlan`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from splitserve.engine.attention.base import AttentionBackend, AttentionPlan, AttentionShape
from splitserve.engine.batch import Batch, Ints
from splitserve.engine.triton_kernels.decode import DecodeRows, decode_parts
from splitserve.engine.triton_kernels.merge import merge_parts
from splitserve.engine.triton_kernels.parts import Partials, most_parts
from splitserve.engine.triton_kernels.prefill import (
    PrefillTiles,
    cut_into_tiles,
    prefill,
    tile_queries,
)

_BORDER = 4  # in int32: kernels are compiled anew for pointers that are not on a 16-byte border


class TritonAttention(AttentionBackend):
    """Plans batches for the device that their tensors are on."""

    def __init__(self, shape: AttentionShape, dtype: torch.dtype) -> None:
        self._shape = shape
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

    def static_plan(
        self, num_rows: int, most_tokens: int, block_size: int, device: torch.device
    ) -> StaticDecodePlan:
        """For up to `num_rows` decode rows of up to `most_tokens` of context each."""
        return StaticDecodePlan(self._shape, num_rows, most_tokens, block_size, device)


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


class StaticDecodePlan(AttentionPlan):
    """Owns tensors that a CUDA graph may be captured over: `load` fills them for each batch.

    Attends over `num_rows` tokens, whose tail pads; rows of the tail come out as zeros.
    """

    def __init__(
        self,
        shape: AttentionShape,
        num_rows: int,
        most_tokens: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.num_rows, self.most_tokens = num_rows, most_tokens
        self._width = -(-most_tokens // block_size)
        self._rows = DecodeRows(
            torch.arange(num_rows, dtype=torch.int32, device=device),
            torch.zeros(num_rows, dtype=torch.int32, device=device),
            torch.zeros(num_rows, self._width, dtype=torch.int32, device=device),
        )
        partials = _partials(shape, self._rows, most_tokens)
        self._plan = _TritonPlan(shape, self._rows, partials, None)

    def load(self, batch: Batch) -> None:
        """Take on a batch of decode rows that fits."""
        num_rows, width = batch.block_tables.shape
        assert num_rows <= self.num_rows and batch.context_lens.max() <= self.most_tokens
        assert (batch.query_lens == 1).all(), "a static plan is for decode rows"
        device = self._rows.context_lens.device
        context_lens = _staged((self.num_rows,), device).zero_()
        context_lens.numpy()[:num_rows] = batch.context_lens
        block_tables = _staged((self.num_rows, self._width), device).zero_()
        block_tables.numpy()[:num_rows, :width] = batch.block_tables
        self._rows.context_lens.copy_(context_lens, non_blocking=True)
        self._rows.block_tables.copy_(block_tables, non_blocking=True)

    def attend(self, query: Tensor, layer_kv: Tensor) -> Tensor:
        assert len(query) == self.num_rows
        return self._plan.attend(query, layer_kv)


def to_device(arrays: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """Each array as int32 on the device. They go there in one copy, which does not block."""
    starts, length = [], 0
    for array in arrays:
        starts.append(length)
        length += -(-array.size // _BORDER) * _BORDER
    packed = _staged((length,), device)
    numbers = packed.numpy()
    for start, array in zip(starts, arrays, strict=True):
        numbers[start : start + array.size] = array.reshape(-1)
    there = packed.to(device, non_blocking=True)
    return [
        there[start : start + array.size].view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def _staged(size: tuple[int, ...], device: torch.device) -> Tensor:
    """Memory on the host that a copy to the device need not wait for."""
    return torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")


def _partials(shape: AttentionShape, rows: DecodeRows, most_tokens: int) -> Partials:
    num_rows, device = len(rows.token_rows), rows.token_rows.device
    num_parts = most_parts(most_tokens)
    return Partials.allocate(num_rows, num_parts, shape.num_heads, shape.head_dim, device)
