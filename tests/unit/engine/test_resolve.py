from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from splitserve.config import EngineConfig, KVLayout
from splitserve.engine import resolve
from splitserve.engine.model_runner import ModelRunner
from splitserve.engine.models.config import read_config
from splitserve.errors import ConfigError
from tests.unit.engine.conftest import LoadRunner

TOKEN_BYTES = 2 * 2 * 2 * 32 * 4  # layers, K and V, heads, head_dim, f32


def test_nothing_is_left_open(tiny_llama: Path) -> None:
    runner = ModelRunner.load(EngineConfig(str(tiny_llama)))
    torch.set_num_threads(1)
    config = runner.config
    assert config.dtype in ("bfloat16", "float32")
    assert config.attention_backend == "cpu"
    assert (config.max_model_len, runner.max_model_len) == (512, 512)
    assert (config.max_num_batched_tokens, runner.max_num_batched_tokens) == (512, 512)
    assert config.num_threads == runner.num_threads == resolve.num_cores()
    assert config.num_blocks == runner.num_blocks == runner.kv_cache.num_blocks
    assert runner.vocab_size == 260
    assert runner.layout == runner.kv_cache.layout == KVLayout(config.dtype, 2, 2, 32, 16)


def test_the_cache_is_a_gibibyte_or_a_tenth_of_what_is_free(
    tiny_llama: Path, load: LoadRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "free_memory_bytes", lambda: 10 * 100 * 16 * TOKEN_BYTES + 9)
    assert load(tiny_llama, num_blocks=None).num_blocks == 100
    monkeypatch.setattr(resolve, "free_memory_bytes", lambda: 1 << 50)
    assert load(tiny_llama, num_blocks=None).num_blocks == (1 << 30) // (16 * TOKEN_BYTES)


def test_memory_asked_for_and_blocks_asked_for(tiny_llama: Path, load: LoadRunner) -> None:
    memory = 5 * 8 * TOKEN_BYTES + 1
    asked = {"block_size": 8, "kv_cache_memory_bytes": memory}
    assert load(tiny_llama, num_blocks=None, **asked).num_blocks == 5
    assert load(tiny_llama, num_blocks=7, **asked).num_blocks == 7


def test_free_memory_is_something_sensible() -> None:
    assert 1 << 20 < resolve.free_memory_bytes() < 1 << 50


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"max_model_len": 513}, "max_model_len 513.*512"),
        ({"max_model_len": 0}, "max_model_len 0"),
        ({"block_size": 0}, "block_size 0"),
        ({"num_blocks": 0}, "num_blocks 0"),
        ({"num_blocks": None, "kv_cache_memory_bytes": 100}, "kv_cache_memory_bytes 100"),
        ({"attention_backend": "triton"}, "attention_backend 'triton'"),
    ],
)
def test_what_can_not_work_is_refused_by_name(
    tiny_llama: Path, load: LoadRunner, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tiny_llama, **changes)


def test_without_triton_its_extra_is_named(
    tiny_llama: Path, load: LoadRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match=r"'triton' on cpu needs triton: .*splitserve\[triton\]"):
        load(tiny_llama, attention_backend="triton")


@pytest.mark.parametrize(
    ("name", "num_gpus", "message"),
    [
        ("tpu", 2, "'tpu' is not supported; there are cpu and cuda:N"),
        ("cuda", 2, "'cuda' is not supported"),
        ("cuda:-1", 2, "'cuda:-1' is not supported"),
        ("cuda:0", 0, "'cuda:0' needs a GPU, and this torch"),
        ("cuda:2", 2, "'cuda:2' is not here: there are 2 GPUs, from cuda:0 on"),
    ],
)
def test_a_device_that_is_not_here_is_refused(
    monkeypatch: pytest.MonkeyPatch, tiny_llama: Path, name: str, num_gpus: int, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(ConfigError, match=message):
        ModelRunner.load(EngineConfig(str(tiny_llama)), name)


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve.resolve_device("cpu") == torch.device("cpu")
    assert resolve.resolve_device("cuda:1") == torch.device("cuda", 1)


def on_gpu(directory: Path, **changes: Any) -> EngineConfig:
    options: dict[str, Any] = {"dtype": "bfloat16", "num_threads": 1}
    asked = EngineConfig(str(directory), **(options | changes))
    return resolve.resolve(asked, *read_config(directory), torch.device("cuda", 0))


def test_on_a_gpu_only_the_number_of_blocks_is_left_open(tiny_llama: Path) -> None:
    config = on_gpu(tiny_llama)
    assert (config.attention_backend, config.dtype) == ("triton", "bfloat16")
    assert (config.max_num_batched_tokens, config.max_model_len) == (8192, 512)
    assert config.num_blocks is None
    assert on_gpu(tiny_llama, num_blocks=7).num_blocks == 7
    memory = 5 * 16 * TOKEN_BYTES // 2 + 1
    assert on_gpu(tiny_llama, kv_cache_memory_bytes=memory).num_blocks == 5
    assert on_gpu(tiny_llama, attention_backend="reference").attention_backend == "reference"


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "float16"), ((9, 0), "bfloat16")])
def test_on_a_gpu_auto_is_what_it_multiplies(
    monkeypatch: pytest.MonkeyPatch, tiny_llama: Path, capability: tuple[int, int], dtype: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert on_gpu(tiny_llama, dtype="auto").dtype == dtype
    for explicit in ("float16", "float32"):
        assert on_gpu(tiny_llama, dtype=explicit).dtype == explicit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_backend": "cpu"}, "attention_backend 'cpu' is for CPUs.* cuda:0"),
        ({"quantization": "int8"}, "quantization int8 needs attention_backend cpu"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype int8 needs attention_backend cpu"),
        ({"kv_cache_memory_bytes": 100}, "kv_cache_memory_bytes 100"),
    ],
)
def test_what_a_gpu_can_not_do_is_refused(
    tiny_llama: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        on_gpu(tiny_llama, **changes)


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ({"avx512_bf16": True}, "bfloat16"),
        ({"amx_bf16": True}, "bfloat16"),
        ({"bf16": True, "architecture": "aarch64"}, "bfloat16"),
        ({"avx512_bf16": False, "avx2": True}, "float32"),
        ({}, "float32"),
    ],
)
def test_auto_is_bfloat16_where_the_cpu_has_it(
    flags: dict[str, Any],
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)
    with caplog.at_level(logging.INFO):
        assert resolve.resolve_dtype("auto") == dtype
    assert ("float32" in caplog.text) == (dtype == "float32")
