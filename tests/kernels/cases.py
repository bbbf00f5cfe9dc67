"""Random batches for attention kernels, with NaN wherever a kernel must not look."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from splitserve.engine.attention import make_attention
from splitserve.engine.attention.base import AttentionShape
from splitserve.engine.batch import Batch, Chunk, build_batch

Spans = tuple[tuple[int, int], ...]

# The KV block borders of decode rows, of their parts, and of several parts.
DECODE_SPANS = ((0, 1), (15, 16), (16, 17), (127, 128), (128, 129), (299, 300))
# From the start and behind a cached prefix; shorter and longer than a tile of queries.
PREFILL_SPANS = ((0, 2), (0, 17), (16, 48), (30, 65), (60, 190))
# GQA ratio, KV heads, head_dim.
SHAPES = ((1, 2, 64), (3, 2, 64), (4, 2, 128), (8, 1, 80), (3, 1, 80), (1, 1, 128), (8, 1, 64))


@dataclass(frozen=True)
class Case:
    """A batch over one layer of a paged cache; `spans` are (start, end) of each chunk."""

    group: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    spans: Spans
    block_size: int = 16
    device: str = "cpu"

    @property
    def shape(self) -> AttentionShape:
        num_heads = self.group * self.num_kv_heads
        return AttentionShape(num_heads, self.num_kv_heads, self.head_dim, self.head_dim**-0.5)

    def batch(self) -> Batch:
        """Every sequence has scattered blocks of its own."""
        needed = [-(-end // self.block_size) for _, end in self.spans]
        ids = list(range(self._num_blocks))
        random.Random(0).shuffle(ids)
        chunks = []
        for (start, end), count in zip(self.spans, needed, strict=True):
            chunks.append(Chunk(range(end), start, end, ids[:count]))
            ids = ids[count:]
        return build_batch(chunks, self.block_size, self.device)

    def layer_kv(self, batch: Batch) -> Tensor:
        size = (2, self._num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        kv = torch.full(size, torch.nan, dtype=self.dtype)
        for table, length in zip(batch.block_tables, batch.context_lens.tolist(), strict=True):
            tokens = np.arange(length)
            slots = table[tokens // self.block_size] * self.block_size + tokens % self.block_size
            # By its length, so that a row has the same numbers beside whichever batch-mates.
            kv.flatten(1, 2)[:, slots] = self._random(length, 2, length, *size[3:])
        return kv.to(self.device)

    def query(self, batch: Batch) -> Tensor:
        """A part of a wider tensor, as where one matrix makes queries, keys and values."""
        num_heads = self.shape.num_heads
        wide = self._random(0, len(batch.positions), num_heads + 3, self.head_dim)
        return wide.to(self.device)[:, :num_heads]

    @property
    def _num_blocks(self) -> int:
        return sum(-(-end // self.block_size) for _, end in self.spans) + 3

    def _random(self, seed: int, *size: int) -> Tensor:
        return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(self.dtype)


def reference(case: Case, batch: Batch, query: Tensor, layer_kv: Tensor) -> Tensor:
    """f32 attention over the same numbers, rounded once, in the plainest torch."""
    backend = make_attention("reference", case.shape, torch.float32)
    with torch.inference_mode():
        exact = backend.plan(batch).attend(query.float(), layer_kv.float())
    return exact.to(case.dtype)
