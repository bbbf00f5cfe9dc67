"""Decode rows by a C++ kernel that reads KV blocks in place (paged_decode.cpp)."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from splitserve.engine.attention.base import AttentionShape
from splitserve.engine.batch import Batch, Ints
from splitserve.engine.native import load_library

_SOURCE = Path(__file__).with_suffix(".cpp")
_FUNCTIONS = {torch.float32: "paged_decode_float32", torch.bfloat16: "paged_decode_bfloat16"}
_HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
_POINTER = ctypes.c_void_p


class _Plan(ctypes.Structure):
    """`struct Plan` of the source, with its `Heads` at the end."""

    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("num_parts", ctypes.c_int64),
        ("query_rows", _POINTER),
        ("context_lens", _POINTER),
        ("block_tables", _POINTER),
        ("table_width", ctypes.c_int64),
        ("part_rows", _POINTER),
        ("first_parts", _POINTER),
        ("partial", _POINTER),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class PagedDecodeKernel:
    """The compiled function for one shape and dtype, with its memory. One batch at a time."""

    def __init__(self, library: ctypes.CDLL, shape: AttentionShape, dtype: torch.dtype) -> None:
        self.shape = shape
        self.part_tokens = int(library.paged_decode_part_tokens())
        self._function = getattr(library, _FUNCTIONS[dtype])
        self._function.argtypes = (
            *(ctypes.POINTER(_Plan), ctypes.c_int64, _POINTER, ctypes.c_int64),
            *(_POINTER, _POINTER, _POINTER, ctypes.c_int),
        )
        self._scratch = torch.empty(0)

    @classmethod
    def load(cls, shape: AttentionShape, dtype: torch.dtype) -> PagedDecodeKernel | None:
        """None for shapes and dtypes that it has no code for, and where it can't be compiled."""
        if dtype not in _FUNCTIONS or shape.head_dim not in _HEAD_DIMS:
            return None
        library = load_library(_SOURCE)
        return None if library is None else cls(library, shape, dtype)

    def scratch(self, num_parts: int) -> Tensor:
        """Room for what each part leaves for the merge; the next batch gets the same memory."""
        size = num_parts * self.shape.num_heads * (self.shape.head_dim + 2)
        if len(self._scratch) < size:
            self._scratch = torch.empty(size)
        return self._scratch

    def run(self, plan: _Plan, query: Tensor, layer_kv: Tensor) -> Tensor:
        """See `PagedDecodeGroup.attend`."""
        shape = self.shape
        assert query.stride()[1:] == (shape.head_dim, 1), "heads of a token are not contiguous"
        assert layer_kv.is_contiguous(), "a layer of the cache is not contiguous"
        output = query.new_empty(plan.num_rows, shape.num_heads * shape.head_dim)
        keys, values = layer_kv.unbind(0)
        missing = self._function(
            plan,
            *(shape.head_dim, query.data_ptr(), query.stride(0)),
            *(keys.data_ptr(), values.data_ptr(), output.data_ptr(), torch.get_num_threads()),
        )
        assert not missing, f"no code for head_dim {shape.head_dim}"
        return output


class PagedDecodeGroup:
    """Rows with one query each. `token_rows` says where in the batch the results belong."""

    def __init__(self, kernel: PagedDecodeKernel, batch: Batch, rows: Ints) -> None:
        token_rows = batch.query_starts[rows]
        context_lens = batch.context_lens[rows]
        num_parts = -(-context_lens // kernel.part_tokens)
        first_parts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(num_parts, out=first_parts[1:])
        block_tables = np.ascontiguousarray(batch.block_tables[rows])
        part_rows = np.repeat(np.arange(len(rows)), num_parts)
        scratch = kernel.scratch(len(part_rows))
        self.token_rows = torch.from_numpy(token_rows)
        self._kernel = kernel
        self._alive = (token_rows, context_lens, block_tables, part_rows, first_parts, scratch)
        self._plan = _Plan(
            len(rows),
            len(part_rows),
            *(array.ctypes.data for array in (token_rows, context_lens, block_tables)),
            block_tables.shape[1],
            *(part_rows.ctypes.data, first_parts.ctypes.data, scratch.data_ptr()),
            *(kernel.shape.num_heads, kernel.shape.num_kv_heads, batch.block_size),
            kernel.shape.scale,
        )

    def attend(self, query: Tensor, layer_kv: Tensor) -> Tensor:
        """Attention [rows, num_heads * head_dim] of these rows; see AttentionPlan.attend."""
        return self._kernel.run(self._plan, query, layer_kv)
