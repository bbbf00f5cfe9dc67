"""Tokens of the paged cache to and from one contiguous tensor, which is what a transfer sends."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 16
_MOST_NUMBERS = 512


@triton.jit(do_not_specialize=["num_tokens"])
def _copy_kv(  # noqa: PLR0913 - a kernel has no other way to be told
    kv: tl.tensor,
    layer_stride: tl.tensor,
    half_stride: tl.tensor,
    token_stride: tl.tensor,
    staging: tl.tensor,
    slots: tl.tensor,
    num_tokens: tl.tensor,
    size: tl.constexpr,
    tokens_at_once: tl.constexpr,
    numbers_at_once: tl.constexpr,
    gather: tl.constexpr,
) -> None:
    tokens = tl.program_id(0) * tokens_at_once + tl.arange(0, tokens_at_once)
    numbers = tl.program_id(1) * numbers_at_once + tl.arange(0, numbers_at_once)
    plane = tl.program_id(2).to(tl.int64)  # layer * 2 + (0 for keys, 1 for values)
    slot = tl.load(slots + tokens, mask=tokens < num_tokens, other=0).to(tl.int64)
    inside = (tokens < num_tokens)[:, None] & (numbers < size)[None, :]
    cached = kv + plane // 2 * layer_stride + plane % 2 * half_stride
    cached = cached + slot[:, None] * token_stride + numbers[None, :]
    staged = staging + (plane * num_tokens + tokens)[:, None] * size + numbers[None, :]
    if gather:
        tl.store(staged, tl.load(cached, mask=inside), mask=inside)
    else:
        tl.store(cached, tl.load(staged, mask=inside), mask=inside)


def gather_kv(kv: Tensor, slots: Tensor, staging: Tensor) -> None:
    """Copy tokens into `staging`, contiguous [num_layers, 2, num_tokens, num_heads, head_dim].

    `kv` is KVCache.tensor or a run of its layers and of its heads:
    `tensor[first_layer:last_layer, :, :, :, first_head:last_head]`. `slots` [num_tokens] are
    block_id * block_size + place, of an integer type.
    """
    _launch(kv, slots, staging, gather=True)


def scatter_kv(kv: Tensor, slots: Tensor, staging: Tensor) -> None:
    """Copy `staging` into the cache, as `gather_kv` copies out of it. No slot may come twice."""
    _launch(kv, slots, staging, gather=False)


def _launch(kv: Tensor, slots: Tensor, staging: Tensor, gather: bool) -> None:
    num_layers, _, _, block_size, num_heads, head_dim = kv.shape
    assert kv.stride()[4:] == (head_dim, 1) and kv.stride(2) == block_size * kv.stride(3)
    assert staging.is_contiguous() and staging.dtype == kv.dtype
    assert staging.shape == (num_layers, 2, len(slots), num_heads, head_dim), staging.shape
    size = num_heads * head_dim
    numbers = min(triton.next_power_of_2(size), _MOST_NUMBERS)
    grid = (triton.cdiv(len(slots), _TOKENS), triton.cdiv(size, numbers), num_layers * 2)
    _copy_kv[grid](
        kv,
        kv.stride(0),
        kv.stride(1),
        kv.stride(3),
        staging,
        slots,
        len(slots),
        size=size,
        tokens_at_once=_TOKENS,
        numbers_at_once=numbers,
        gather=gather,
        num_warps=4,
    )
