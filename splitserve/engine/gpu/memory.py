"""How many KV blocks a GPU has room for, once the weights are there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from splitserve.config import EngineConfig, KVLayout
from splitserve.engine.kv_cache import DTYPES
from splitserve.engine.models.config import ModelConfig
from splitserve.errors import ConfigError

# Of a logit while tokens are drawn with top_p: itself in f32, its weight and their running sum in
# int64, and as much again that comes and goes (sampler.py). And in what captured passes keep.
_BYTES_PER_LOGIT = 40 + 12
_MOST_PARTS = 64  # of a context in decode attention (triton_kernels/parts.py), in f32


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Of one GPU, bytes."""

    total_bytes: int
    free_bytes: int
    own_bytes: int  # what this process holds by now: the weights

    @classmethod
    def of(cls, device: torch.device) -> GpuMemory:
        torch.cuda.empty_cache()  # what loading took beside the weights
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, torch.cuda.memory_reserved(device))

    def num_blocks(self, config: EngineConfig, layout: KVLayout, pass_bytes: int) -> int:
        """How many blocks fit into this worker's share, `gpu_memory_utilization` of the whole,
        beside the weights and a pass; and into what is free, which others may use too.

        Raises ConfigError for none.
        """
        share = config.gpu_memory_utilization
        room = int(self.total_bytes * share) - self.own_bytes - pass_bytes
        room = min(room, self.free_bytes - pass_bytes)
        num_blocks = room // (layout.token_bytes * layout.block_size)
        if num_blocks < 1:
            raise ConfigError(
                f"gpu_memory_utilization {share:g} of {_gib(self.total_bytes)} leaves no room for "
                f"KV: weights take {_gib(self.own_bytes)}, a pass up to {_gib(pass_bytes)}, and "
                f"{_gib(self.free_bytes)} are free"
            )
        return num_blocks


def pass_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """About the most that a pass takes beside weights and KV; of a resolved config."""
    assert config.max_num_batched_tokens is not None
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    # The residual stream before and after, normed, and a projection; qkv, and as much rotated.
    numbers = 4 * model.hidden_size + 2 * qkv + 3 * model.intermediate_size
    logits = config.max_num_seqs * model.vocab_size
    tokens = config.max_num_batched_tokens * numbers * DTYPES[config.dtype].itemsize
    parts = config.max_num_seqs * model.num_heads * model.head_dim * _MOST_PARTS * 4
    return tokens + logits * _BYTES_PER_LOGIT + parts


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
