"""The activation of a gated MLP."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_MOST_NUMBERS = 1024


@triton.jit
def _silu_and_mul(
    gate_up: tl.tensor,
    stride: tl.tensor,
    output: tl.tensor,
    size: tl.constexpr,
    numbers_at_once: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    numbers = tl.program_id(1) * numbers_at_once + tl.arange(0, numbers_at_once)
    inside = numbers < size
    source = gate_up + token * stride + numbers
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + size, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(output + token * size + numbers, result.to(output.dtype.element_ty), mask=inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of `gate_up`, [num_tokens, 2 * size]: [num_tokens, size], contiguous."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    output = gate_up.new_empty(num_tokens, size)
    numbers = min(triton.next_power_of_2(size), _MOST_NUMBERS)
    _silu_and_mul[(num_tokens, triton.cdiv(size, numbers))](
        gate_up, gate_up.stride(0), output, size=size, numbers_at_once=numbers, num_warps=4
    )
    return output
