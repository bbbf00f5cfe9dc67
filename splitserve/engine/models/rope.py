"""Rotary position embedding (Su et al., "RoFormer", 2021): tables made once, and their use."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from splitserve.engine.models.config import RopeConfig
from splitserve.errors import ConfigError

# Kinds whose factor may reach beyond max_position_embeddings.
_STRETCHING = ("linear", "yarn")
_CPU = torch.device("cpu")


def longest_context(rope: RopeConfig, max_positions: int) -> int:
    """The most tokens a sequence of this model may have, its scaling used to the full."""
    if rope.kind not in _STRETCHING:
        return max_positions
    trained = rope.parameters.get("original_max_position_embeddings") or max_positions
    stretched = float(trained) * (rope.parameters.get("factor") or 1.0)
    return max(max_positions, int(min(stretched, sys.maxsize)))  # an infinite float is no int


class Rope:
    """Cosines and sines [max_model_len, 1, head_dim] in f32, for every kind transformers knows.

    They are computed on the CPU, so that they are the same on every device.

    Where the kind depends on a sequence's length (longrope), max_model_len decides for all:
    keys in the cache can't be turned again when a sequence grows past the border. Raises
    ConfigError for an unknown kind.
    """

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        max_model_len: int,
        device: torch.device = _CPU,
    ) -> None:
        frequencies, factor = frequencies_of(rope, head_dim, max_model_len)
        angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequencies
        cosine, sine = angles.cos() * factor, angles.sin() * factor
        self._cosine = torch.cat((cosine, cosine), -1)[:, None].to(device)
        # Half a turn to the left of the vector is its rotation but for the sign of one half.
        self._sine = torch.cat((-sine, sine), -1)[:, None].to(device)
        self._half = head_dim // 2

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines [max_model_len, head_dim]; of the first half, minus the sine."""
        return self._cosine[:, 0], self._sine[:, 0]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What `rotate` needs for tokens at these positions, [num_tokens]."""
        return self._cosine.index_select(0, positions), self._sine.index_select(0, positions)

    def rotate(self, heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """[num_tokens, num_heads, head_dim], turned in f32 and rounded once."""
        cosine, sine = angles
        exact = heads.float()
        return torch.addcmul(exact * cosine, exact.roll(self._half, -1), sine).to(heads.dtype)


def frequencies_of(rope: RopeConfig, head_dim: int, max_model_len: int) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] and what cosines and sines are multiplied by."""
    if rope.kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / (rope.theta**exponents), 1.0
    # Only here: importing it takes as long as the rest of a worker's start.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if rope.kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(sorted(("default", *ROPE_INIT_FUNCTIONS)))
        raise ConfigError(
            f"rope scaling of kind {rope.kind!r} is not supported; there are: {known}"
        )
    assert rope.source is not None
    try:
        frequencies, attention_factor = ROPE_INIT_FUNCTIONS[rope.kind](
            rope.source, torch.device("cpu"), seq_len=max_model_len
        )
        factor = float(attention_factor)
    except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise ConfigError(f"rope scaling of kind {rope.kind!r}: {error}") from error
    if frequencies.shape != (head_dim // 2,):
        raise ConfigError(f"rope scaling of kind {rope.kind!r} does not rotate whole heads")
    return frequencies, factor
