"""The decoder by Triton kernels and torch's matrix products."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from splitserve.engine.attention.base import AttentionPlan
from splitserve.engine.attention.triton_backend import TritonAttention
from splitserve.engine.batch import Batch
from splitserve.engine.gpu.passes import DecodePasses, Limits
from splitserve.engine.gpu.rows import Tokens
from splitserve.engine.models.checkpoint import LayerWeights, read_layer, read_outer
from splitserve.engine.models.config import ModelConfig
from splitserve.engine.models.rope import Rope
from splitserve.engine.models.weights import Weights, open_weights
from splitserve.engine.triton_kernels.rms_norm import add_rms_norm, rms_norm
from splitserve.engine.triton_kernels.rope import Angles, rotate
from splitserve.engine.triton_kernels.silu_and_mul import silu_and_mul
from splitserve.engine.triton_kernels.write_kv import write_kv


class GpuDecoder:
    """Owns the weights of one checkpoint on a GPU. One batch at a time.

    Decode batches replay what was captured; the others are launched kernel by kernel.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, rope: Rope, attention: TritonAttention
    ) -> None:
        self._config, self._rope, self._attention = config, rope, attention
        self._layers = [read_layer(weights, config, i) for i in range(config.num_layers)]
        self._outer = read_outer(weights, config)
        # Adding a layer's output is one kernel with the norm that follows it.
        self._next_norms = [layer.attention_norm for layer in self._layers[1:]]
        self._next_norms.append(self._outer.norm)
        self._passes: DecodePasses | None = None

    @classmethod
    def load(
        cls, directory: Path, config: ModelConfig, rope: Rope, attention: TritonAttention
    ) -> GpuDecoder:
        """The weights go to where the tables of `rope` are, and into the dtype of `attention`.

        Raises ConfigError naming what the checkpoint lacks.
        """
        device = rope.tables[0].device
        with open_weights(directory, attention.dtype, device) as weights:
            return cls(config, weights, rope, attention)

    def capture(self, kv: Tensor, limits: Limits) -> None:
        """Capture the passes of decode batches over the cache `kv`. Nothing is written into it."""
        forward = partial(self._all_logits, kv)
        self._passes = DecodePasses(forward, self._attention, limits, kv.device)

    def __call__(self, batch: Batch, kv: Tensor) -> Tensor:
        """Write the batch's KV into the cache `kv` and return logits [logits_rows, vocab].

        The batch is on the host, and `kv` is the cache that passes were captured over, if any.
        Raises IndexError for a token id outside the vocabulary, or a position behind max_model_len.
        """
        batch.check(self._config.vocab_size, len(self._rope.tables[0]))
        if self._passes is not None and (logits := self._passes.run(batch)) is not None:
            return logits
        there = batch.to(kv.device)
        tokens = Tokens(there.token_ids, there.positions, there.slot_mapping.int())
        hidden = self._hidden(tokens, self._attention.plan(there), kv)
        return F.linear(hidden.index_select(0, there.logits_rows), self._outer.head)

    def _all_logits(self, kv: Tensor, tokens: Tokens, plan: AttentionPlan) -> Tensor:
        return F.linear(self._hidden(tokens, plan, kv), self._outer.head)

    def _hidden(self, tokens: Tokens, plan: AttentionPlan, kv: Tensor) -> Tensor:
        """[num_tokens, hidden], the last norm applied."""
        eps = self._config.norm_eps
        residual = self._outer.embedding.index_select(0, tokens.token_ids)
        angles = self._rope.at(tokens.positions)
        normed = rms_norm(residual, self._layers[0].attention_norm, eps)
        for layer, layer_kv, next_norm in zip(self._layers, kv, self._next_norms, strict=True):
            query = self._write(layer, normed, layer_kv, tokens.slot_mapping, angles)
            attended = F.linear(plan.attend(query, layer_kv), *layer.output)
            normed, residual = add_rms_norm(attended, residual, layer.mlp_norm, eps)
            activated = silu_and_mul(F.linear(normed, *layer.gate_up))
            normed, residual = add_rms_norm(
                F.linear(activated, *layer.down), residual, next_norm, eps
            )
        return normed

    def _write(
        self, layer: LayerWeights, normed: Tensor, layer_kv: Tensor, slots: Tensor, angles: Angles
    ) -> Tensor:
        """Write the tokens' keys and values; their queries [num_tokens, num_heads, head_dim]."""
        config = self._config
        num_rotated = config.num_heads + config.num_kv_heads
        heads = F.linear(normed, *layer.qkv).view(len(normed), -1, config.head_dim)
        rotated, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if layer.qk_norm is not None:
            rotated = rms_norm(rotated, layer.qk_norm, config.norm_eps)
        rotated = rotate(rotated, angles)
        write_kv(layer_kv, slots, rotated[:, config.num_heads :], value)
        return rotated[:, : config.num_heads]
