"""The C++ structs of decoder.cpp and attention.h, field for field."""

from __future__ import annotations

import ctypes

POINTER = ctypes.c_void_p
INT = ctypes.c_int64


class Matrix(ctypes.Structure):
    """`struct Matrix` of matmul.h: one packed weight."""

    _fields_ = (
        *((name, POINTER) for name in ("panels", "scales", "bias")),
        *((name, INT) for name in ("num_panels", "num_pairs")),
    )


class Layer(ctypes.Structure):
    """`struct Layer`: the weights of one layer."""

    _fields_ = (
        *((name, Matrix) for name in ("qkv", "output", "gate_up", "down")),
        *((name, POINTER) for name in ("attention_norm", "mlp_norm", "qk_norm")),
    )


class Model(ctypes.Structure):
    """`struct Model`, with its `Heads` spelled out at the start."""

    _fields_ = (
        *((name, INT) for name in ("num_heads", "num_kv_heads", "head_dim")),
        ("scale", ctypes.c_float),
        ("int8_kv", ctypes.c_int32),
        *((name, INT) for name in ("num_layers", "hidden", "vocab")),
        ("eps", ctypes.c_float),
        ("layers", ctypes.POINTER(Layer)),
        ("embedding", POINTER),
        ("norm", POINTER),
        ("head", Matrix),
        ("cosine", POINTER),
        ("sine", POINTER),
    )


class BatchView(ctypes.Structure):
    """`struct Batch`: where the arrays of a batch lie."""

    _fields_ = (
        *((name, INT) for name in ("num_tokens", "num_seqs", "num_logits_rows")),
        *((name, POINTER) for name in ("token_ids", "positions", "slot_mapping")),
        *((name, POINTER) for name in ("query_starts", "context_lens", "block_tables")),
        *((name, INT) for name in ("table_width", "block_size")),
        ("logits_rows", POINTER),
    )
