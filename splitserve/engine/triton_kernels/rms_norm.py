"""RMS norm, alone or after the residual is added, in one pass over the numbers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_NUMBERS_PER_WARP = 512


@triton.jit
def _rms_norm(  # noqa: PLR0913 - a kernel has no other way to be told
    x: tl.tensor,
    x_stride: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    summed: tl.tensor,
    eps: tl.tensor,
    num_heads: tl.constexpr,
    size: tl.constexpr,
    padded_size: tl.constexpr,
    adds: tl.constexpr,
) -> None:
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    numbers = tl.arange(0, padded_size)
    inside = numbers < size
    place = (token * num_heads + head) * size + numbers
    exact = tl.load(x + token * x_stride + head * size + numbers, mask=inside, other=0.0)
    exact = exact.to(tl.float32)
    if adds:
        exact += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        rounded = exact.to(summed.dtype.element_ty)
        tl.store(summed + place, rounded, mask=inside)
        exact = rounded.to(tl.float32)  # as if the sum had been a tensor of its own
    scale = tl.rsqrt(tl.sum(exact * exact, 0) / size + eps)
    weights = tl.load(weight + head * size + numbers, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + place, (exact * scale * weights).to(normed.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """models/layers.py's RMSNorm of `x`, [num_tokens, size] or [num_tokens, num_heads, size].

    `weight` [size] or [num_heads, size] is a row for each head. Contiguous, of x's dtype.
    """
    normed = x.new_empty(x.shape)
    _launch(x, x, weight, normed, x, eps)
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of `x + residual` (rounded to their dtype), and that sum."""
    assert residual.is_contiguous() and residual.shape == x.shape
    normed, summed = x.new_empty(x.shape), x.new_empty(x.shape)
    _launch(x, residual, weight, normed, summed, eps)
    return normed, summed


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor, normed: Tensor, summed: Tensor, eps: float
) -> None:
    num_heads, size = x.shape[1] if x.dim() == 3 else 1, x.shape[-1]
    assert x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == size)
    assert weight.is_contiguous() and weight.numel() == num_heads * size
    padded = triton.next_power_of_2(size)
    _rms_norm[(len(x), num_heads)](
        x,
        x.stride(0),
        residual,
        weight,
        normed,
        summed,
        eps,
        num_heads=num_heads,
        size=size,
        padded_size=padded,
        adds=residual is not x,
        num_warps=max(1, min(16, padded // _NUMBERS_PER_WARP)),
    )
