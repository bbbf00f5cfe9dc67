"""The seam between the decoder and the kernels that attend over the paged cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from splitserve.engine.batch import Batch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a backend has to know of the model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head: heads [i * group_size, (i + 1) * group_size)."""
        return self.num_heads // self.num_kv_heads


class AttentionPlan(ABC):
    """Attention for one batch: indices and masks are made once and serve every layer."""

    @abstractmethod
    def attend(self, query: Tensor, layer_kv: Tensor) -> Tensor:
        """Causal attention of every token over its own sequence.

        `query` is [num_tokens, num_heads, head_dim]; `layer_kv` is [2, num_blocks, block_size,
        num_kv_heads, head_dim] and holds the KV of this batch's tokens already. Returns
        [num_tokens, num_heads * head_dim].
        """


class AttentionBackend(ABC):
    """Makes a plan for each batch."""

    @abstractmethod
    def plan(self, batch: Batch) -> AttentionPlan: ...


def write_kv(layer_kv: Tensor, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
    """Put the keys and values [num_tokens, num_kv_heads, head_dim] of new tokens in their places.

    `layer_kv` is one layer of the cache, [2, num_blocks, block_size, num_kv_heads, head_dim].
    """
    keys, values = layer_kv.flatten(1, 2)
    keys.index_copy_(0, slot_mapping, key)
    values.index_copy_(0, slot_mapping, value)
