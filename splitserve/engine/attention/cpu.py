"""Attention on CPU, vectorized over the batch: no loop over sequences in any layer.

Decode rows (one query) go to the C++ kernel, which reads the blocks in place (paged_decode.cpp).
Where it can't be compiled, a context is cut into parts of about 64 tokens, and each (row, part)
pair is one matrix of a batched matmul, so nothing is padded by more than a part. Every matrix has
the same shape whatever else is in the batch, and a row's parts are added in order: a row's numbers
do not depend on its batch-mates. (The cut is that of "Flash-Decoding", Dao et al. 2023; the softmax
here runs over the whole row at once, since scores are small.)

    row 0, 150 tokens   [part 0][part 1][part 2]     scores   [0][1][2][-inf]
    row 1, 250 tokens   [part 3][part 4][part 5][part 6]      [3][4][5][6]

Prefill chunks. Sequences whose sizes round up alike share one scaled_dot_product_attention, with
the query heads that share a KV head folded into the query length (an explicit mask together with
enable_gqa is more than twice as slow). Each is padded to its own size rounded up, never to a
batch-mate's: torch picks its tiles by size, and other tiles give other roundings.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from splitserve.engine.attention.base import AttentionBackend, AttentionPlan, AttentionShape
from splitserve.engine.attention.paged_decode import PagedDecodeGroup, PagedDecodeKernel
from splitserve.engine.batch import Batch, Ints

_PART_TOKENS = 64
# Scores are padded to the longest row. More padding than this (in parts) costs more than a
# second round of operations over the rows that are much shorter.
_MAX_PADDED_PARTS = 256
_QUERY_STEP, _CONTEXT_STEP = 32, 64  # what prefill sizes are rounded up to


class CpuAttention(AttentionBackend):
    """Owns the memory that gathered keys and values go through. One batch at a time.

    Without a `kernel` for them, decode rows are computed in plain torch.
    """

    def __init__(
        self, shape: AttentionShape, dtype: torch.dtype, kernel: PagedDecodeKernel | None
    ) -> None:
        self._shape = shape
        self._dtype = dtype
        self._kernel = kernel
        self._gathered = torch.empty(2, 0, dtype=dtype)

    def plan(self, batch: Batch) -> AttentionPlan:
        single = batch.query_lens == 1
        groups = self._decode_groups(np.flatnonzero(single), batch)
        for rows in _prefill_groups(np.flatnonzero(~single), batch):
            groups.append(_PrefillGroup(self, batch, rows))
        return _CpuPlan(groups, int(batch.query_starts[-1]))

    def _decode_groups(self, rows: Ints, batch: Batch) -> list[_Group]:
        if self._kernel is None:
            groups = _decode_groups(rows, batch, _part_blocks(batch))
            return [_DecodeGroup(self, batch, group) for group in groups]
        return [PagedDecodeGroup(self._kernel, batch, rows)] if len(rows) else []

    @property
    def shape(self) -> AttentionShape:
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def gather(self, layer_kv: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [len(rows), head_dim] of single (token, head) pairs.

        They live in memory that the next call overwrites: fresh memory for megabytes in every
        layer would spend more time in page faults than in copying.
        """
        size = len(rows) * self._shape.head_dim
        if self._gathered.shape[1] < size:
            self._gathered = torch.empty(2, size, dtype=self._dtype)
        keys, values = self._gathered[:, :size].view(2, len(rows), -1).unbind(0)
        all_keys, all_values = layer_kv.view(2, -1, self._shape.head_dim).unbind(0)
        torch.index_select(all_keys, 0, rows, out=keys)
        torch.index_select(all_values, 0, rows, out=values)
        return keys, values

    def rows_of(self, blocks: Ints, block_size: int) -> Tensor:
        """Which rows of a layer's keys, seen as [tokens * kv_heads, head_dim], some blocks are.

        `blocks` is [n, num_blocks]; the rows come as [n, kv_heads, num_blocks * block_size],
        flat, so that what is gathered is a contiguous matrix for each head.
        """
        tokens = (blocks[:, :, None] * block_size + np.arange(block_size)).reshape(
            len(blocks), 1, -1
        )
        heads = np.arange(self._shape.num_kv_heads)[:, None]
        return _tensor(tokens * self._shape.num_kv_heads + heads).view(-1)


class _Group(Protocol):
    """Sequences computed together. `token_rows` says where in the batch the results belong."""

    token_rows: Tensor

    def attend(self, query: Tensor, layer_kv: Tensor) -> Tensor: ...


class _CpuPlan(AttentionPlan):
    def __init__(self, groups: list[_Group], num_tokens: int) -> None:
        self._groups = groups
        self._num_tokens = num_tokens

    def attend(self, query: Tensor, layer_kv: Tensor) -> Tensor:
        if len(self._groups) == 1:  # one group has every token, in order
            return self._groups[0].attend(query, layer_kv)
        output = query.new_empty(self._num_tokens, query.shape[1] * query.shape[2])
        for group in self._groups:
            output.index_copy_(0, group.token_rows, group.attend(query, layer_kv))
        return output


class _DecodeGroup(_Group):
    """Rows with one query each, cut into parts: plain torch, where the kernel is missing."""

    def __init__(self, backend: CpuAttention, batch: Batch, rows: Ints) -> None:
        self._backend = backend
        shape, size = backend.shape, batch.block_size
        part_blocks = _part_blocks(batch)
        self._part_tokens = part_blocks * size
        num_parts = -(-batch.context_lens[rows] // self._part_tokens)
        self._num_rows, self._most_parts = len(rows), int(num_parts.max())
        firsts = np.cumsum(num_parts) - num_parts
        row_of_part = np.repeat(np.arange(len(rows)), num_parts)
        place = np.arange(len(row_of_part)) - firsts[row_of_part]

        columns = place[:, None] * part_blocks + np.arange(part_blocks)
        blocks = batch.block_tables[rows[row_of_part][:, None], _within(columns, batch)]
        self._kv_rows = backend.rows_of(blocks, size)
        token_rows = batch.query_starts[rows]
        self.token_rows = _tensor(token_rows)
        self._query_rows = _tensor(token_rows[row_of_part])
        self._row_of_part = _tensor(row_of_part)

        heads = np.arange(shape.num_heads)
        nearest = firsts[:, None] + np.minimum(np.arange(self._most_parts), num_parts[:, None] - 1)
        padded = nearest[:, None, :] * shape.num_heads + heads[:, None]  # [rows, heads, parts]
        self._to_rows = _tensor(padded).view(-1)
        cut = (row_of_part[:, None] * shape.num_heads + heads) * self._most_parts + place[:, None]
        self._to_parts = _tensor(cut).view(-1)
        tokens = np.arange(self._most_parts * self._part_tokens)
        outside = tokens >= batch.context_lens[rows][:, None, None]
        self._bias = _tensor(np.where(outside, np.float32(-np.inf), np.float32(0)))

    def attend(self, query: Tensor, layer_kv: Tensor) -> Tensor:
        shape, part = self._backend.shape, self._part_tokens
        num_rows, num_parts = self._num_rows, len(self._row_of_part)
        matrices = num_parts * shape.num_kv_heads
        keys, values = self._backend.gather(layer_kv, self._kv_rows)
        queries = query.index_select(0, self._query_rows)
        scores = torch.bmm(
            queries.view(matrices, shape.group_size, -1),
            keys.view(matrices, part, -1).transpose(1, 2),
        )
        rows = scores.view(-1, part).index_select(0, self._to_rows).float()
        rows = rows.view(num_rows, shape.num_heads, -1).mul_(shape.scale).add_(self._bias)
        weights = rows.softmax(-1).to(query.dtype).view(-1, part)
        weights = weights.index_select(0, self._to_parts).view(matrices, shape.group_size, part)
        parts = torch.bmm(weights, values.view(matrices, part, -1)).view(num_parts, -1).float()
        output = parts.new_zeros(num_rows, parts.shape[1])
        return output.index_add_(0, self._row_of_part, parts).to(query.dtype)


class _PrefillGroup(_Group):
    """Chunks of alike size, padded to the largest."""

    def __init__(self, backend: CpuAttention, batch: Batch, rows: Ints) -> None:
        self._backend = backend
        query_lens, context_lens = batch.query_lens[rows], batch.context_lens[rows]
        self._num_rows = len(rows)
        self._num_queries = int(_rounded_up(query_lens, _QUERY_STEP)[0])
        num_blocks = -(-int(_rounded_up(context_lens, _CONTEXT_STEP)[0]) // batch.block_size)
        columns = _within(np.arange(num_blocks), batch)
        self._kv_rows = backend.rows_of(batch.block_tables[rows][:, columns], batch.block_size)

        places = np.arange(self._num_queries)
        padded = np.minimum(places, query_lens[:, None] - 1)
        query_rows = batch.query_starts[rows][:, None] + padded
        self._query_rows = _tensor(query_rows).view(-1)
        inside = (places < query_lens[:, None]).reshape(-1)
        self._inside = None if inside.all() else _tensor(np.flatnonzero(inside))
        self.token_rows = _tensor(query_rows.reshape(-1)[inside])

        positions = (context_lens - query_lens)[:, None] + padded
        positions = np.repeat(positions, backend.shape.group_size, axis=1)
        future = np.arange(num_blocks * batch.block_size) > positions[:, None, :, None]
        bias = torch.zeros(future.shape, dtype=backend.dtype)
        self._bias = bias.masked_fill_(torch.from_numpy(future), -torch.inf)

    def attend(self, query: Tensor, layer_kv: Tensor) -> Tensor:
        shape = self._backend.shape
        keys, values = self._backend.gather(layer_kv, self._kv_rows)
        kv_shape = (self._num_rows, shape.num_kv_heads, -1, shape.head_dim)
        queries = query.index_select(0, self._query_rows).view(
            self._num_rows, self._num_queries, shape.num_kv_heads, shape.group_size, -1
        )
        output = F.scaled_dot_product_attention(
            queries.transpose(1, 2).reshape(kv_shape),
            keys.view(kv_shape),
            values.view(kv_shape),
            attn_mask=self._bias,
            scale=shape.scale,
        )
        output = output.view(queries.transpose(1, 2).shape).transpose(1, 2)
        output = output.reshape(self._num_rows * self._num_queries, -1)
        return output if self._inside is None else output.index_select(0, self._inside)


def _part_blocks(batch: Batch) -> int:
    return max(_PART_TOKENS // batch.block_size, 1)


def _decode_groups(rows: Ints, batch: Batch, part_blocks: int) -> list[Ints]:
    """Decode rows, usually all together; much shorter ones apart if padding them would cost."""
    groups: list[Ints] = []
    num_parts = -(-batch.context_lens // (part_blocks * batch.block_size))
    while len(rows):
        longest = num_parts[rows].max()
        if len(rows) * longest - num_parts[rows].sum() <= _MAX_PADDED_PARTS:
            return [*groups, rows]
        long = num_parts[rows] * 4 > longest
        groups.append(rows[long])
        rows = rows[~long]
    return groups


def _prefill_groups(rows: Ints, batch: Batch) -> list[Ints]:
    """Prefill chunks whose sizes round up alike."""
    queries = _rounded_up(batch.query_lens[rows], _QUERY_STEP)
    contexts = _rounded_up(batch.context_lens[rows], _CONTEXT_STEP)
    sizes, group_of_row = np.unique(np.stack((queries, contexts)), axis=1, return_inverse=True)
    return [rows[group_of_row.reshape(-1) == group] for group in range(sizes.shape[1])]


def _rounded_up(sizes: Ints, step: int) -> Ints:
    rounded: Ints = -(-sizes // step) * step
    return rounded


def _within(columns: Ints, batch: Batch) -> Ints:
    """Columns of the block tables; what lies behind the last is padded as rows are: column 0."""
    inside: Ints = np.where(columns < batch.block_tables.shape[1], columns, 0)
    return inside


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
