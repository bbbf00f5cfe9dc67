"""Attention one sequence at a time, in the plainest torch: what other backends are held to."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from splitserve.engine.attention.base import AttentionBackend, AttentionPlan, AttentionShape
from splitserve.engine.batch import Batch


class ReferenceAttention(AttentionBackend):
    """Runs anywhere torch does. Scores and sums are f32."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def plan(self, batch: Batch) -> AttentionPlan:
        return _ReferencePlan(self._shape, batch)


class _ReferencePlan(AttentionPlan):
    def __init__(self, shape: AttentionShape, batch: Batch) -> None:
        self._shape = shape
        self._batch = batch

    def attend(self, query: Tensor, layer_kv: Tensor) -> Tensor:
        batch = self._batch
        outputs = []
        for i, table in enumerate(batch.block_tables):
            num_tokens = int(batch.context_lens[i])
            num_blocks = -(-num_tokens // batch.block_size)
            blocks = torch.from_numpy(table[:num_blocks]).to(layer_kv.device)
            key, value = layer_kv[:, blocks].flatten(1, 2)[:, :num_tokens].unbind(0)
            rows = query[int(batch.query_starts[i]) : int(batch.query_starts[i + 1])]
            outputs.append(self._attend_one(rows, key, value))
        return torch.cat(outputs).flatten(1)

    def _attend_one(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [queries, heads, head_dim], key and value [tokens, kv_heads, head_dim]."""
        num_queries, num_tokens = len(query), len(key)
        key, value = (
            kv.float().repeat_interleave(self._shape.group_size, 1) for kv in (key, value)
        )
        scores = torch.einsum("qhd,thd->hqt", query.float(), key) * self._shape.scale
        future = torch.ones(num_queries, num_tokens, dtype=torch.bool, device=query.device)
        future = future.triu(num_tokens - num_queries + 1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        return torch.einsum("hqt,thd->qhd", weights, value).to(query.dtype)
