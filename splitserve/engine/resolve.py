"""What a config left open, settled by the model and the machine: dtype, lengths, memory."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Literal

import torch

from splitserve.config import EngineConfig, KVLayout
from splitserve.engine.models.config import ModelConfig, RopeConfig
from splitserve.engine.models.rope import longest_context
from splitserve.errors import ConfigError

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
CPU_BATCHED_TOKENS = 512
GPU_BATCHED_TOKENS = 8192
MOST_CPU_KV_BYTES = 1 << 30
_FIRST_WITH_BF16 = (8, 0)  # compute capability
_NATIVE_BF16 = ("avx512_bf16", "amx_bf16", "bf16")

Dtype = Literal["float32", "bfloat16", "float16"]
Backend = Literal["auto", "reference", "cpu", "triton"]


def resolve(
    config: EngineConfig, model: ModelConfig, rope: RopeConfig, device: torch.device = CPU
) -> EngineConfig:
    """The config with nothing left open, but num_blocks on a GPU: how many there is room for is
    known when the weights are there (gpu/memory.py).

    Raises ConfigError naming key and limit.
    """
    on_gpu = device.type == "cuda"
    batched_tokens = GPU_BATCHED_TOKENS if on_gpu else CPU_BATCHED_TOKENS
    resolved = dataclasses.replace(
        config,
        dtype=_gpu_dtype(config.dtype, device) if on_gpu else resolve_dtype(config.dtype),
        max_model_len=_max_model_len(config.max_model_len, model, rope),
        num_threads=config.num_threads or num_cores(),
        max_num_batched_tokens=config.max_num_batched_tokens or batched_tokens,
        attention_backend=_attention_backend(config.attention_backend, device),
    )
    _check_int8(resolved)
    if config.block_size < 1:
        raise ConfigError(f"block_size {config.block_size} is below 1")
    num_blocks = _num_blocks(resolved, layout_of(resolved, model), on_gpu)
    return dataclasses.replace(resolved, num_blocks=num_blocks)


def resolve_device(name: str) -> torch.device:
    """The device of that name, "cpu" or "cuda:N". Raises ConfigError where it is not here."""
    kind, _, number = name.partition(":")
    if name == "cpu":
        return CPU
    if kind != "cuda" or not number.isdecimal():
        raise ConfigError(f"device {name!r} is not supported; there are cpu and cuda:N")
    if not torch.cuda.is_available():
        built = "sees no GPU" if torch.version.cuda else "is built for CPUs only"
        raise ConfigError(f"device {name!r} needs a GPU, and this torch {built}")
    num_gpus = torch.cuda.device_count()
    if int(number) >= num_gpus:
        raise ConfigError(f"device {name!r} is not here: there are {num_gpus} GPUs, from cuda:0 on")
    return torch.device("cuda", int(number))


def layout_of(config: EngineConfig, model: ModelConfig) -> KVLayout:
    """The KV layout of a resolved config."""
    dtype = config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    return KVLayout(dtype, model.num_layers, model.num_kv_heads, model.head_dim, config.block_size)


def _check_int8(config: EngineConfig) -> None:
    for key in ("quantization", "kv_cache_dtype"):
        if getattr(config, key) != "int8":
            continue
        for other, needed in (("dtype", "bfloat16"), ("attention_backend", "cpu")):
            if (value := getattr(config, other)) != needed:
                raise ConfigError(f"{key} int8 needs {other} {needed}; it is {value}")


def resolve_dtype(dtype: str) -> Dtype:
    """The dtype a CPU computes in. Raises ConfigError for float16."""
    if dtype == "float16":
        raise ConfigError("dtype float16 is not supported on CPU; use bfloat16 or float32")
    if dtype == "auto":
        if has_native_bf16():
            return "bfloat16"
        logger.info("dtype auto: float32, because this CPU has no native bfloat16")
        return "float32"
    return "bfloat16" if dtype == "bfloat16" else "float32"


def _gpu_dtype(dtype: Dtype | Literal["auto"], device: torch.device) -> Dtype:
    """float16 where the GPU does not multiply bfloat16 itself."""
    if dtype != "auto":
        return dtype
    if torch.cuda.get_device_capability(device) >= _FIRST_WITH_BF16:
        return "bfloat16"
    logger.info("dtype auto: float16, because this GPU has no native bfloat16")
    return "float16"


def _attention_backend(asked: Backend, device: torch.device) -> Backend:
    if asked == "auto":
        return "triton" if device.type == "cuda" else "cpu"
    if asked == "cpu" and device.type != "cpu":
        raise ConfigError(f"attention_backend 'cpu' is for CPUs, and the device is {device}")
    return asked


def has_native_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 itself (AVX-512 BF16, AMX, or Arm's BF16)."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in _NATIVE_BF16)


def num_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_memory_bytes() -> int:
    """Memory to be had without swapping: the machine's, or what a container's limit leaves."""
    page = os.sysconf("SC_PAGE_SIZE")
    free = page * os.sysconf("SC_PHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free


def _max_model_len(asked: int | None, model: ModelConfig, rope: RopeConfig) -> int:
    length = model.max_positions if asked is None else asked
    limit = longest_context(rope, model.max_positions)
    if not 1 <= length <= limit:
        raise ConfigError(f"max_model_len {length} is not between 1 and the model's {limit}")
    if model.window is not None and length > model.window:
        raise ConfigError(
            f"sliding_window {model.window} is not supported: it would change answers longer than "
            f"that; set max_model_len to at most {model.window}"
        )
    return length


def _num_blocks(config: EngineConfig, layout: KVLayout, on_gpu: bool) -> int | None:
    if config.num_blocks is not None:
        if config.num_blocks < 1:
            raise ConfigError(f"num_blocks {config.num_blocks} is below 1")
        return config.num_blocks
    memory = config.kv_cache_memory_bytes
    if memory is None and on_gpu:
        return None
    if memory is None:
        memory = min(MOST_CPU_KV_BYTES, free_memory_bytes() // 10)
    num_blocks = memory // (layout.token_bytes * layout.block_size)
    if num_blocks < 1:
        block = layout.token_bytes * layout.block_size
        raise ConfigError(f"kv_cache_memory_bytes {memory} is less than one block of {block} bytes")
    return num_blocks
