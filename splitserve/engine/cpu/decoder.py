"""The decoder as one C++ call a step, for bf16 on CPUs that multiply it (decoder.cpp)."""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from splitserve.engine.batch import Batch
from splitserve.engine.cpu.structs import INT, POINTER, BatchView, Layer, Matrix, Model
from splitserve.engine.models.checkpoint import (
    Affine,
    LayerWeights,
    read_layer,
    read_outer,
)
from splitserve.engine.models.config import ModelConfig
from splitserve.engine.models.rope import Rope
from splitserve.engine.models.weights import Weights, open_weights
from splitserve.engine.native import load_library
from splitserve.engine.pages import PagePool
from splitserve.errors import ConfigError
from splitserve.work import Operation

STAGES = (  # `enum Stage`, in its order
    *("embedding", "norm", "qkv linear", "rotation, KV write", "attention"),
    *("output linear", "gate and up linear", "down linear", "LM head"),
)
_SOURCE = Path(__file__).with_suffix(".cpp")
_HEAD_STEP, _MOST_HEAD_DIM = 8, 1024
_PANEL, _GATE_COLUMNS = 32, 16  # columns of a panel; and of the gate in one


class CpuDecoder:
    """Owns the packed weights of one checkpoint and the memory of a pass. One batch at a time.

    A row's logits do not depend on its batch-mates, on how its tokens were cut into chunks, or on
    the number of threads: not by a bit.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        config: ModelConfig,
        weights: Weights,
        rope: Rope,
        *,
        int8: bool = False,
        int8_kv: bool = False,
    ) -> None:
        self._library = _declared(library)
        self._int8, self._int8_kv = int8, int8_kv
        self._vocab_size = config.vocab_size
        self._pages = PagePool()
        self._alive: list[object] = []  # what the structs point at
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._laps = np.zeros((8 * config.num_layers + 2, 3))
        self._sampled = False  # whether the last pass had an LM head
        self._crew = _Crew(library, 1)
        self._model = self._load(config, weights, rope)

    @classmethod
    def load(
        cls,
        directory: Path,
        config: ModelConfig,
        rope: Rope,
        *,
        int8: bool = False,
        int8_kv: bool = False,
    ) -> CpuDecoder | None:
        """None where this CPU does not multiply bfloat16 as it needs, where nothing can be
        compiled, and for heads it has no code for. With `int8`, weights are kept in that; with
        `int8_kv`, the cache it is called with is.

        Raises ConfigError naming what the checkpoint lacks.
        """
        if not torch.cpu.get_capabilities().get("avx512_bf16", False):
            return None
        if config.head_dim % _HEAD_STEP or config.head_dim > _MOST_HEAD_DIM:
            return None
        library = load_library(_SOURCE)
        if library is None:
            return None
        with open_weights(directory, torch.bfloat16) as weights:
            return cls(library, config, weights, rope, int8=int8, int8_kv=int8_kv)

    def __call__(self, batch: Batch, kv: Tensor) -> Tensor:
        """Write the batch's KV into the cache `kv`; logits [logits_rows, vocab] in f32.

        Raises IndexError for a token id outside the vocabulary, or a position behind max_model_len.
        """
        assert kv.dtype == (torch.int8 if self._int8_kv else torch.bfloat16), kv.dtype
        assert kv.is_contiguous()
        batch.check(self._vocab_size, self._num_positions)
        logits = torch.empty(len(batch.logits_rows), self._vocab_size)
        tables = batch.block_tables
        view = BatchView(
            *(len(batch.token_ids), len(batch.query_lens), len(batch.logits_rows)),
            *(batch.token_ids.data_ptr(), batch.positions.data_ptr()),
            *(batch.slot_mapping.data_ptr(), batch.query_starts.ctypes.data),
            *(batch.context_lens.ctypes.data, tables.ctypes.data, tables.shape[1]),
            *(batch.block_size, batch.logits_rows.data_ptr()),
        )
        memory = self._memory_for(len(batch.token_ids))
        if self._crew.size != torch.get_num_threads():
            self._crew = _Crew(self._library, torch.get_num_threads())
        self._library.decoder_forward(
            *(self._model, view, kv.data_ptr(), kv[0, 0].nbytes, logits.data_ptr()),
            *(memory, self._crew.handle, self._laps.ctypes.data),
        )
        self._sampled = len(logits) > 0
        return logits

    def operations(self) -> list[Operation]:
        """What the last pass consisted of, one behind the other."""
        num_stages = len(self._laps) if self._sampled else len(self._laps) - 1
        return [
            Operation(STAGES[int(stage)], started_at, duration_s)
            for stage, started_at, duration_s in self._laps[:num_stages].tolist()
        ]

    def _memory_for(self, num_tokens: int) -> int:
        size = self._library.decoder_memory_bytes(self._model, num_tokens) + 64
        if len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8)
        return -(-self._memory.data_ptr() // 64) * 64

    def _load(self, config: ModelConfig, weights: Weights, rope: Rope) -> Model:
        layers = (Layer * config.num_layers)()
        for i in range(config.num_layers):
            layers[i] = self._layer(read_layer(weights, config, i))
        outer = read_outer(weights, config)
        cosine, sine = rope.tables
        self._alive.append(layers)
        self._num_positions = len(cosine)
        return Model(
            *(config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5),
            self._int8_kv,
            *(config.num_layers, config.hidden_size, config.vocab_size, config.norm_eps, layers),
            *(self._kept(outer.embedding), self._kept(outer.norm.float())),
            *(self._packed(Affine(outer.head)), self._kept(cosine), self._kept(sine)),
        )

    def _layer(self, weights: LayerWeights) -> Layer:
        weight, bias = weights.gate_up
        gate_up = Affine(_interleaved(weight), None if bias is None else _interleaved(bias))
        matrices = weights.qkv, weights.output, gate_up, weights.down
        norms = weights.attention_norm, weights.mlp_norm, weights.qk_norm
        return Layer(
            *(self._packed(matrix) for matrix in matrices),
            *(None if norm is None else self._kept(norm.float()) for norm in norms),
        )

    def _packed(self, affine: Affine) -> Matrix:
        weight, scales = affine.weight.contiguous(), None
        num_rows, num_columns = weight.shape
        padding = (0, -num_rows % _PANEL)
        pack = self._library.decoder_pack_bf16
        if self._int8:
            weight, scales = quantized(weight)
            pack = self._library.decoder_pack_int8
        num_pairs = -(-num_columns // 2)
        panels = self._pages.empty((num_rows + padding[1]) * num_pairs * 2, weight.dtype)
        pack(weight.data_ptr(), num_rows, num_columns, panels.data_ptr())
        per_column = (
            None if numbers is None else self._kept(F.pad(numbers.float(), padding))
            for numbers in (scales, affine.bias)
        )
        return Matrix(self._kept(panels), *per_column, -(-num_rows // _PANEL), num_pairs)

    def _kept(self, tensor: Tensor) -> int:
        """The address of a tensor that lives as long as this decoder."""
        tensor = tensor.contiguous()
        self._alive.append(tensor)
        return tensor.data_ptr()


class _Crew:
    """Owns the threads of a pass; between passes they sleep."""

    def __init__(self, library: ctypes.CDLL, size: int) -> None:
        self.size = size
        handle: int | None = library.decoder_crew(size)
        if handle is None:
            raise ConfigError(f"num_threads {size} is more than this machine lets a process have")
        self.handle = handle
        # Not at exit: another thread may be in a pass still.
        weakref.finalize(self, library.decoder_dismiss, handle).atexit = False


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [out, in] in int8, and the scale [out] in f32 that each of its rows is to be
    multiplied by: its largest number becomes 127."""
    exact = weight.float()
    scales = exact.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (exact / scales[:, None]).round().to(torch.int8), scales


def _interleaved(gate_up: Tensor) -> Tensor:
    """Rows of gate and up, [2 * n, ...], so that a panel holds 16 of one and the same 16 of the
    other; missing rows are zeros."""
    halves = torch.stack(gate_up.chunk(2))
    missing = -halves.shape[1] % _GATE_COLUMNS
    padded = F.pad(halves, (*(0, 0) * (gate_up.dim() - 1), 0, missing))
    groups = padded.view(2, -1, _GATE_COLUMNS, *gate_up.shape[1:])
    return groups.transpose(0, 1).flatten(0, 2)


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    sizes = (INT * 4)()
    library.decoder_struct_bytes(sizes)
    declared = [ctypes.sizeof(struct) for struct in (Matrix, Layer, Model, BatchView)]
    assert list(sizes) == declared, f"structs are {list(sizes)} there, {declared} here"
    for pack in (library.decoder_pack_bf16, library.decoder_pack_int8):
        pack.argtypes = (POINTER, INT, INT, POINTER)
        pack.restype = None
    library.decoder_memory_bytes.argtypes = (ctypes.POINTER(Model), INT)
    library.decoder_memory_bytes.restype = INT
    library.decoder_forward.argtypes = (
        *(ctypes.POINTER(Model), ctypes.POINTER(BatchView), POINTER, INT, POINTER),
        *(POINTER, POINTER, POINTER),
    )
    library.decoder_forward.restype = None
    library.decoder_crew.argtypes = (ctypes.c_int,)
    library.decoder_crew.restype = POINTER
    library.decoder_dismiss.argtypes = (POINTER,)
    library.decoder_dismiss.restype = None
    return library
