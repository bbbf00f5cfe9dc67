"""Rotary position embedding of queries and keys."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

Angles = tuple[Tensor, Tensor]


@triton.jit
def _rotate(  # noqa: PLR0913 - a kernel has no other way to be told
    heads: tl.tensor,
    heads_stride: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    output: tl.tensor,
    num_heads: tl.constexpr,
    half: tl.constexpr,
    padded_heads: tl.constexpr,
    padded_half: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    rows, dims = tl.arange(0, padded_heads), tl.arange(0, padded_half)
    is_dim = dims < half
    inside = (rows < num_heads)[:, None] & is_dim[None, :]
    places = rows[:, None] * (2 * half) + dims[None, :]
    source = heads + token * heads_stride + places
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    angle = token * (2 * half) + dims
    cosines = tl.load(cosine + angle, mask=is_dim, other=0.0)[None, :]
    # The first half of the table has the sign that the rotation gives the second half's numbers.
    sines = tl.load(sine + angle + half, mask=is_dim, other=0.0)[None, :]
    target = output + token * num_heads * (2 * half) + places
    turned = first * cosines - second * sines
    tl.store(target, turned.to(output.dtype.element_ty), mask=inside)
    turned = second * cosines + first * sines
    tl.store(target + half, turned.to(output.dtype.element_ty), mask=inside)


def rotate(heads: Tensor, angles: Angles) -> Tensor:
    """models/rope.py's Rope.rotate: `angles` [num_tokens, 1, head_dim] f32 are those of Rope.at.

    `heads` [num_tokens, num_heads, head_dim] may be a part of a wider tensor; the result is
    contiguous.
    """
    num_tokens, num_heads, head_dim = heads.shape
    cosine, sine = angles
    assert heads.stride()[1:] == (head_dim, 1)
    assert cosine.is_contiguous() and sine.is_contiguous()
    output = heads.new_empty(heads.shape)
    _rotate[(num_tokens,)](
        heads,
        heads.stride(0),
        cosine,
        sine,
        output,
        num_heads=num_heads,
        half=head_dim // 2,
        padded_heads=triton.next_power_of_2(num_heads),
        padded_half=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
    )
    return output
