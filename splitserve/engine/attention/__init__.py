"""Attention backends by name. Each is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from splitserve.engine.attention.base import AttentionBackend, AttentionShape
from splitserve.errors import ConfigError

Maker = Callable[[AttentionShape, torch.dtype], AttentionBackend]


def _make_reference(shape: AttentionShape, dtype: torch.dtype) -> AttentionBackend:
    from splitserve.engine.attention.reference import ReferenceAttention

    return ReferenceAttention(shape)


def _make_cpu(shape: AttentionShape, dtype: torch.dtype) -> AttentionBackend:
    from splitserve.engine.attention.cpu import CpuAttention
    from splitserve.engine.attention.paged_decode import PagedDecodeKernel

    return CpuAttention(shape, dtype, PagedDecodeKernel.load(shape, dtype))


def _make_triton(shape: AttentionShape, dtype: torch.dtype) -> AttentionBackend:
    """Raises ConfigError without triton or without a GPU, unless triton is told to interpret."""
    try:
        import triton

        from splitserve.engine.attention.triton_backend import TritonAttention
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ConfigError(
            "attention_backend 'triton' needs triton: pip install 'splitserve[triton]'"
        ) from error
    if not torch.cuda.is_available() and not triton.knobs.runtime.interpret:
        raise ConfigError("attention_backend 'triton' needs a GPU, and there is none")
    return TritonAttention(shape, dtype)


BACKENDS: dict[str, Maker] = {
    "reference": _make_reference,
    "cpu": _make_cpu,
    "triton": _make_triton,
}


def make_attention(name: str, shape: AttentionShape, dtype: torch.dtype) -> AttentionBackend:
    """The backend of that name, for this model. Raises ConfigError for one that is not here."""
    if name not in BACKENDS:
        have = ", ".join(sorted(BACKENDS))
        raise ConfigError(f"attention_backend {name!r} is not available; there are: {have}")
    return BACKENDS[name](shape, dtype)
