"""One decoder for Llama, Mistral, Qwen2 and Qwen3: they differ in biases and a norm."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from splitserve.engine.attention.base import AttentionBackend, AttentionPlan, write_kv
from splitserve.engine.batch import Batch
from splitserve.engine.models.config import ModelConfig
from splitserve.engine.models.layers import GatedMLP, Linear, RMSNorm
from splitserve.engine.models.rope import Rope
from splitserve.engine.models.weights import Weights, open_weights

Angles = tuple[Tensor, Tensor]


class Attention:
    """Queries, keys and values from one matrix; attention over the cache; the output matrix."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, rope: Rope) -> None:
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim = config.head_dim
        self._rope = rope
        sizes = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        rows = {f"{prefix}{name}_proj": n * config.head_dim for name, n in sizes.items()}
        self._qkv = fused(weights, rows, config.hidden_size, config.qkv_bias)
        output = {f"{prefix}o_proj": config.hidden_size}
        inner = config.num_heads * config.head_dim
        self._output = fused(weights, output, inner, config.output_bias)
        self._qk_norm = self._load_qk_norm(config, weights, prefix) if config.qk_norm else None

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

    def _load_qk_norm(self, config: ModelConfig, weights: Weights, prefix: str) -> RMSNorm:
        """Queries and keys are normalised head by head: one norm with a weight row per head."""
        query = weights.get(f"{prefix}q_norm.weight", config.head_dim)
        key = weights.get(f"{prefix}k_norm.weight", config.head_dim)
        rows = [query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)]
        return RMSNorm(torch.cat(rows), config.norm_eps)


class Layer:
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, rope: Rope) -> None:
        hidden = config.hidden_size
        self.attention = Attention(config, weights, f"{prefix}self_attn.", rope)
        inner = {f"{prefix}mlp.{name}_proj": config.intermediate_size for name in ("gate", "up")}
        outer = {f"{prefix}mlp.down_proj": hidden}
        self.mlp = GatedMLP(
            fused(weights, inner, hidden, config.mlp_bias),
            fused(weights, outer, config.intermediate_size, config.mlp_bias),
        )
        self.attention_norm, self.mlp_norm = (
            RMSNorm(weights.get(f"{prefix}{name}_layernorm.weight", hidden), config.norm_eps)
            for name in ("input", "post_attention")
        )


class Decoder:
    """The model of one checkpoint. Knows batches and the cache, nothing of serving."""

    def __init__(
        self, config: ModelConfig, weights: Weights, rope: Rope, attention: AttentionBackend
    ) -> None:
        self._rope = rope
        self._attention = attention
        self._layers = [
            Layer(config, weights, f"model.layers.{i}.", rope) for i in range(config.num_layers)
        ]
        self._norm = RMSNorm(weights.get("model.norm.weight", config.hidden_size), config.norm_eps)
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = weights.get("model.embed_tokens.weight", *shape)
        tied = config.tied_embeddings
        self._head = Linear(self._embedding if tied else weights.get("lm_head.weight", *shape))

    def __call__(self, batch: Batch, kv: Tensor) -> Tensor:
        """Write the batch's KV into the cache `kv` and return logits [logits_rows, vocab]."""
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
    """The decoder with its weights laid out. Raises ConfigError naming what is missing."""
    with open_weights(directory, dtype) as weights:
        return Decoder(config, weights, rope, attention)


def fused(weights: Weights, rows: dict[str, int], columns: int, bias: bool) -> Linear:
    """Matrices that share their input as one; `rows` says how many each adds."""
    matrices = [weights.get(f"{name}.weight", n, columns) for name, n in rows.items()]
    biases = [weights.get(f"{name}.bias", n) for name, n in rows.items()] if bias else []
    return Linear(torch.cat(matrices), torch.cat(biases) if biases else None)
