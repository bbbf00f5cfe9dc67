"""How much of a GPU becomes KV."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from splitserve.config import EngineConfig, KVLayout
from splitserve.engine.gpu.memory import GpuMemory, pass_bytes
from splitserve.engine.models.config import read_config
from splitserve.errors import ConfigError

GIB = 1 << 30
LAYOUT = KVLayout("bfloat16", 32, 8, 128, 16)
BLOCK_BYTES = 16 * LAYOUT.token_bytes  # 2 MiB
CONFIG = EngineConfig("m", dtype="bfloat16", max_num_batched_tokens=8192)


def test_a_share_of_the_gpu_holds_weights_a_pass_and_kv() -> None:
    memory = GpuMemory(total_bytes=80 * GIB, free_bytes=63 * GIB, own_bytes=16 * GIB)
    assert memory.num_blocks(CONFIG, LAYOUT, 2 * GIB) == (72 - 16 - 2) * GIB // BLOCK_BYTES


def test_what_is_not_free_is_not_taken() -> None:
    memory = GpuMemory(total_bytes=80 * GIB, free_bytes=33 * GIB, own_bytes=16 * GIB)
    assert memory.num_blocks(CONFIG, LAYOUT, 2 * GIB) == (33 - 2) * GIB // BLOCK_BYTES


def test_workers_that_share_a_gpu_fit_whoever_comes_first() -> None:
    half = replace(CONFIG, gpu_memory_utilization=0.45)
    first = GpuMemory(total_bytes=80 * GIB, free_bytes=64 * GIB, own_bytes=16 * GIB)
    taken = first.num_blocks(half, LAYOUT, GIB) * BLOCK_BYTES
    second = GpuMemory(80 * GIB, free_bytes=64 * GIB - 16 * GIB - taken - GIB, own_bytes=16 * GIB)
    assert second.num_blocks(half, LAYOUT, GIB) * BLOCK_BYTES == taken


@pytest.mark.parametrize("free_bytes", [60 * GIB, GIB])
def test_no_room_is_refused_with_the_numbers(free_bytes: int) -> None:
    memory = GpuMemory(80 * GIB, free_bytes, own_bytes=15 * GIB)
    config = replace(CONFIG, gpu_memory_utilization=0.2)
    message = r"gpu_memory_utilization 0.2 of 80.0 GiB .* weights take 15.0 GiB, a pass up to 2.0"
    with pytest.raises(ConfigError, match=message):
        memory.num_blocks(config, LAYOUT, 2 * GIB)


def test_a_pass_takes_more_with_more_tokens_and_more_rows(tiny_llama: Path) -> None:
    model, _ = read_config(tiny_llama)
    least = pass_bytes(CONFIG, model)
    tokens = pass_bytes(replace(CONFIG, max_num_batched_tokens=8193), model) - least
    # Residuals and projections, qkv twice, gate, up and their product.
    assert tokens == (4 * 64 + 2 * 8 * 32 + 3 * 128) * 2
    assert pass_bytes(replace(CONFIG, max_num_seqs=65), model) > least + 260 * 40
