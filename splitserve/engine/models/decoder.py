"""One decoder for Llama, Mistral, Qwen2 and Qwen3: they differ in biases and a norm."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from splitserve.engine.attention.base import AttentionBackend, AttentionPlan, write_kv
from splitserve.engine.batch import Batch
from splitserve.engine.models.checkpoint import LayerWeights, read_layer, read_outer
from splitserve.engine.models.config import ModelConfig
from splitserve.engine.models.layers import GatedMLP, Linear, RMSNorm
from splitserve.engine.models.rope import Rope
from splitserve.engine.models.weights import Weights, open_weights

Angles = tuple[Tensor, Tensor]


class Attention:
    """Queries, keys and values from one matrix; attention over the cache; the output matrix."""

    def __init__(self, config: ModelConfig, weights: LayerWeights, rope: Rope) -> None:
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim = config.head_dim
        self._rope = rope
        self._qkv, self._output = Linear(*weights.qkv), Linear(*weights.output)
        self._qk_norm = None
        if weights.qk_norm is not None:
            self._qk_norm = RMSNorm(weights.qk_norm, config.norm_eps)

    def __call__(
        self, x: Tensor, batch: Batch, layer_kv: Tensor, plan: AttentionPlan, angles: Angles
    ) -> Tensor:
        heads = self._qkv(x).view(len(x), -1, self._head_dim)
        num_rotated = self._num_heads + self._num_kv_heads
        rotated, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if self._qk_norm is not None:
            rotated = self._qk_norm(rotated)
        rotated = self._rope.rotate(rotated, angles)
        query, key = rotated[:, : self._num_heads], rotated[:, self._num_heads :]
        write_kv(layer_kv, batch.slot_mapping, key, value)
        return self._output(plan.attend(query, layer_kv))


class Layer:
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, weights: LayerWeights, rope: Rope) -> None:
        self.attention = Attention(config, weights, rope)
        self.mlp = GatedMLP(Linear(*weights.gate_up), Linear(*weights.down))
        self.attention_norm = RMSNorm(weights.attention_norm, config.norm_eps)
        self.mlp_norm = RMSNorm(weights.mlp_norm, config.norm_eps)


class Decoder:
    """The model of one checkpoint. Knows batches and the cache, nothing of serving."""

    def __init__(
        self, config: ModelConfig, weights: Weights, rope: Rope, attention: AttentionBackend
    ) -> None:
        self._rope = rope
        self._attention = attention
        self._layers = [
            Layer(config, read_layer(weights, config, i), rope) for i in range(config.num_layers)
        ]
        outer = read_outer(weights, config)
        self._norm = RMSNorm(outer.norm, config.norm_eps)
        self._embedding = outer.embedding
        self._head = Linear(outer.head)

    def __call__(self, batch: Batch, kv: Tensor) -> Tensor:
        """Write the batch's KV into the cache `kv` and return logits [logits_rows, vocab]."""
        batch = batch.to(kv.device)
        hidden = self._embedding.index_select(0, batch.token_ids)
        angles = self._rope.at(batch.positions)
        plan = self._attention.plan(batch)
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            x = layer.attention_norm(hidden)
            hidden = hidden + layer.attention(x, batch, layer_kv, plan, angles)
            hidden = hidden + layer.mlp(layer.mlp_norm(hidden))
        return self._head(self._norm(hidden.index_select(0, batch.logits_rows)))


def load_decoder(
    directory: Path,
    config: ModelConfig,
    rope: Rope,
    attention: AttentionBackend,
    dtype: torch.dtype,
) -> Decoder:
    """The decoder with its weights laid out, where the tables of `rope` are.

    Raises ConfigError naming what is missing.
    """
    with open_weights(directory, dtype, rope.tables[0].device) as weights:
        return Decoder(config, weights, rope, attention)
