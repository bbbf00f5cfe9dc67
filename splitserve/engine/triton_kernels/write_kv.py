"""Keys and values of new tokens into their places in the paged cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _write_kv(  # noqa: PLR0913 - a kernel has no other way to be told
    layer_kv: tl.tensor,
    value_offset: tl.tensor,
    slot_mapping: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    token_size: tl.constexpr,
    padded_size: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    numbers = tl.arange(0, padded_size)
    inside = numbers < token_size
    place = layer_kv + slot * token_size + numbers
    tl.store(place, tl.load(key + token * key_stride + numbers, mask=inside), mask=inside)
    values = tl.load(value + token * value_stride + numbers, mask=inside)
    tl.store(place + value_offset, values, mask=inside)


def write_kv(layer_kv: Tensor, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
    """As attention/base.py's. A slot of -1 is that of a token that pads the batch: not written."""
    num_tokens, num_kv_heads, head_dim = key.shape
    assert key.stride()[1:] == value.stride()[1:] == (head_dim, 1)
    assert layer_kv.is_contiguous(), "a layer of the cache is not contiguous"
    size = num_kv_heads * head_dim
    _write_kv[(num_tokens,)](
        layer_kv,
        layer_kv.stride(0),
        slot_mapping,
        key,
        value,
        key.stride(0),
        value.stride(0),
        token_size=size,
        padded_size=triton.next_power_of_2(size),
        num_warps=4,
    )
