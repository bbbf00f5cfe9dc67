"""The parts of a runner, made from a checkpoint for the device at hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from splitserve.config import EngineConfig
from splitserve.engine.attention import make_attention
from splitserve.engine.attention.base import AttentionShape
from splitserve.engine.batch import Batch
from splitserve.engine.cpu.decoder import CpuDecoder
from splitserve.engine.kv_cache import DTYPES, KVCache, PagedKV
from splitserve.engine.models.config import ModelConfig, read_config
from splitserve.engine.models.decoder import load_decoder
from splitserve.engine.models.rope import Rope
from splitserve.engine.resolve import layout_of, resolve
from splitserve.errors import ConfigError

Forward = Callable[[Batch, Tensor], Tensor]
Capture = Callable[[], None]


class Loaded(NamedTuple):
    """All that a runner owns."""

    config: EngineConfig  # resolved: nothing in it is open
    model: ModelConfig
    decoder: Forward
    kv_cache: PagedKV
    capture: Capture | None  # what is left to do before `ready`, when all is compiled


def load(config: EngineConfig, device: torch.device) -> Loaded:
    """Read a Hugging Face directory, and set torch's threads and GPU, which are the process's.

    Raises ConfigError, by name, for what this engine can't run, and for values that can't work.
    """
    model, rope_config = read_config(Path(config.model))
    resolved = resolve(config, model, rope_config, device)
    assert resolved.num_threads and resolved.max_model_len
    torch.set_num_threads(resolved.num_threads)
    uses_triton = device.type == "cuda" or resolved.attention_backend == "triton"
    if uses_triton:
        _require_triton(resolved.attention_backend, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        rope = Rope(rope_config, model.head_dim, resolved.max_model_len, device)
        with torch.inference_mode():
            decoder = _load_decoder(resolved, model, rope)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"{device} has no room for the weights of {config.model}") from error
    if uses_triton:
        return with_gpu_cache(resolved, model, decoder, device)
    assert resolved.num_blocks
    cache = KVCache(layout_of(resolved, model), resolved.num_blocks)
    return Loaded(resolved, model, decoder, cache, None)


def _require_triton(backend: str, device: torch.device) -> None:
    try:
        import triton
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"attention_backend {backend!r} on {device} needs triton: "
            "pip install 'splitserve[triton]'"
        ) from error
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise ConfigError("attention_backend 'triton' needs a GPU, and the device is cpu")


def with_gpu_cache(
    config: EngineConfig, model: ModelConfig, decoder: Forward, device: torch.device
) -> Loaded:
    """With a cache in as much memory as there is, if the config leaves that open."""
    from splitserve.engine.gpu.decoder import GpuDecoder
    from splitserve.engine.gpu.kv_cache import GpuKVCache
    from splitserve.engine.gpu.memory import GpuMemory, pass_bytes
    from splitserve.engine.gpu.passes import Limits

    layout = layout_of(config, model)
    if config.num_blocks is None:
        memory = GpuMemory.of(device)
        num_blocks = memory.num_blocks(config, layout, pass_bytes(config, model))
        config = dataclasses.replace(config, num_blocks=num_blocks)
    assert config.num_blocks and config.max_model_len
    cache = GpuKVCache(layout, config.num_blocks, device)
    if not isinstance(decoder, GpuDecoder):
        return Loaded(config, model, decoder, cache, None)
    limits = Limits(config.max_num_seqs, config.max_model_len, config.block_size)
    return Loaded(config, model, decoder, cache, partial(decoder.capture, cache.tensor, limits))


def _load_decoder(config: EngineConfig, model: ModelConfig, rope: Rope) -> Forward:
    """The compiled decoder where there is one for this device and dtype; else the one of torch."""
    directory, dtype = Path(config.model), DTYPES[config.dtype]
    int8, int8_kv = config.quantization == "int8", config.kv_cache_dtype == "int8"
    if config.attention_backend == "cpu" and dtype == torch.bfloat16:
        compiled = CpuDecoder.load(directory, model, rope, int8=int8, int8_kv=int8_kv)
        if compiled is not None:
            return compiled
    if int8 or int8_kv:
        raise ConfigError(
            "int8 (quantization, kv_cache_dtype) needs a CPU with AVX-512 BF16, a C++ compiler and "
            f"a head_dim that is a multiple of 8; head_dim is {model.head_dim}"
        )
    shape = AttentionShape(
        model.num_heads, model.num_kv_heads, model.head_dim, model.head_dim**-0.5
    )
    attention = make_attention(config.attention_backend, shape, dtype)
    if config.attention_backend != "triton":
        return load_decoder(directory, model, rope, attention, dtype)
    from splitserve.engine.attention.triton_backend import TritonAttention
    from splitserve.engine.gpu.decoder import GpuDecoder

    assert isinstance(attention, TritonAttention)
    return GpuDecoder.load(directory, model, rope, attention)
