"""The weights of a decoder under the names that checkpoints give them, joined where they share an
input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from splitserve.engine.models.config import ModelConfig
from splitserve.engine.models.weights import Weights


class Affine(NamedTuple):
    """x @ weight.T + bias; weight [out, in], bias [out] or none."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Of one layer. Norms are as the checkpoint has them."""

    qkv: Affine  # rows: all query heads, all key heads, all value heads
    output: Affine
    gate_up: Affine  # rows: gate, then up
    down: Affine
    attention_norm: Tensor  # [hidden]
    mlp_norm: Tensor  # [hidden]
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim], one row a head


@dataclass(frozen=True, slots=True, eq=False)
class OuterWeights:
    """What lies before and behind the layers."""

    embedding: Tensor  # [vocab, hidden]
    norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]; tied: the embedding itself


def read_layer(weights: Weights, config: ModelConfig, index: int) -> LayerWeights:
    """Raises ConfigError naming what is missing or has another shape."""
    prefix = f"model.layers.{index}."
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    hidden, inner = config.hidden_size, config.num_heads * config.head_dim
    num_heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    heads = {f"{attention}{name}_proj": n * config.head_dim for name, n in num_heads.items()}
    gate_up = {f"{mlp}{name}_proj": config.intermediate_size for name in ("gate", "up")}
    down = {f"{mlp}down_proj": hidden}
    return LayerWeights(
        qkv=_joined(weights, heads, hidden, config.qkv_bias),
        output=_joined(weights, {f"{attention}o_proj": hidden}, inner, config.output_bias),
        gate_up=_joined(weights, gate_up, hidden, config.mlp_bias),
        down=_joined(weights, down, config.intermediate_size, config.mlp_bias),
        attention_norm=weights.get(f"{prefix}input_layernorm.weight", hidden),
        mlp_norm=weights.get(f"{prefix}post_attention_layernorm.weight", hidden),
        qk_norm=_qk_norm(weights, config, attention) if config.qk_norm else None,
    )


def read_outer(weights: Weights, config: ModelConfig) -> OuterWeights:
    """Raises ConfigError naming what is missing or has another shape."""
    shape = config.vocab_size, config.hidden_size
    embedding = weights.get("model.embed_tokens.weight", *shape)
    head = embedding if config.tied_embeddings else weights.get("lm_head.weight", *shape)
    return OuterWeights(embedding, weights.get("model.norm.weight", config.hidden_size), head)


def _joined(weights: Weights, rows: Mapping[str, int], columns: int, bias: bool) -> Affine:
    """Matrices that share their input as one; `rows` says how many each adds."""
    matrices = [weights.get(f"{name}.weight", n, columns) for name, n in rows.items()]
    biases = [weights.get(f"{name}.bias", n) for name, n in rows.items()] if bias else []
    return Affine(torch.cat(matrices), torch.cat(biases) if biases else None)


def _qk_norm(weights: Weights, config: ModelConfig, prefix: str) -> Tensor:
    """Queries and keys are normalised head by head: one norm with a weight row per head."""
    query = weights.get(f"{prefix}q_norm.weight", config.head_dim)
    key = weights.get(f"{prefix}k_norm.weight", config.head_dim)
    rows = query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)
    return torch.cat(rows)
