"""What `tl.dot` multiplies."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from splitserve.engine.triton_kernels.softmax import absorb

_LEAST_SIZE = 16  # of a matrix, either way

_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def dot_dtype(dtype: torch.dtype) -> Any:
    """The dtype of `tl.dot`'s operands: the tensors' own.

    f32 where kernels are interpreted: the interpreter keeps bf16 as integers, and multiplies
    those.
    """
    return _TRITON_DTYPES[dtype] if isinstance(absorb, triton.JITFunction) else tl.float32


def padded(size: int) -> int:
    """The rows or columns of a matrix that has room for so many."""
    power: int = triton.next_power_of_2(size)
    return max(power, _LEAST_SIZE)
