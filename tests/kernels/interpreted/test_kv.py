"""Writing new tokens, and copying tokens out of the cache and into it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from splitserve.config import KVLayout
from splitserve.engine.attention import base
from splitserve.engine.kv_cache import KVCache
from splitserve.engine.triton_kernels.kv_copy import gather_kv, scatter_kv
from splitserve.engine.triton_kernels.write_kv import write_kv
from tests.kernels.boxes import Box

DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
BLOCK_IDS = (7, 2, 3, 9)


BOXES = [
    Box(0, 3, 0, 20, 0, 4),
    Box(0, 3, 4, 5, 0, 4),
    Box(1, 2, 3, 18, 1, 3),
    Box(0, 1, 5, 6, 3, 4),
]


def slots_of(box: Box) -> Tensor:
    tokens = np.arange(box.token_start, box.token_end)
    return torch.from_numpy(np.array(BLOCK_IDS)[tokens // 5] * 5 + tokens % 5)


def view_of(cache: KVCache, box: Box) -> Tensor:
    layers, heads = slice(box.layer_start, box.layer_end), slice(box.head_start, box.head_end)
    return cache.tensor[layers, :, :, :, heads]


def cache_of(dtype: str, seed: int, head_dim: int = 80) -> KVCache:
    cache = KVCache(KVLayout(dtype, 3, 4, head_dim, 5), num_blocks=11)
    numbers = torch.randn(cache.tensor.shape, generator=torch.Generator().manual_seed(seed))
    cache.tensor.copy_(numbers)
    return cache


def staging_of(cache: KVCache, box: Box) -> Tensor:
    layers, num_tokens = box.layer_end - box.layer_start, box.token_end - box.token_start
    size = (layers, 2, num_tokens, box.head_end - box.head_start, cache.layout.head_dim)
    return torch.full(size, torch.nan, dtype=cache.tensor.dtype)


@DTYPES
@pytest.mark.parametrize("box", BOXES, ids=str)
def test_gather_is_what_the_cache_reads(box: Box, dtype: str) -> None:
    cache = cache_of(dtype, seed=1)
    staging = staging_of(cache, box)
    gather_kv(view_of(cache, box), slots_of(box), staging)
    assert staging.view(torch.uint8).numpy().tobytes() == cache.read(BLOCK_IDS, box)


@DTYPES
@pytest.mark.parametrize("box", BOXES, ids=str)
def test_scatter_is_what_the_cache_writes(box: Box, dtype: str) -> None:
    found, expected = cache_of(dtype, seed=1), cache_of(dtype, seed=1)
    staging = staging_of(found, box)
    staging.copy_(torch.randn(staging.shape, generator=torch.Generator().manual_seed(2)))
    scatter_kv(view_of(found, box), slots_of(box), staging)
    expected.write(BLOCK_IDS, box, staging.view(torch.uint8).numpy().data.cast("B"))
    assert torch.equal(found.tensor, expected.tensor)


@DTYPES
@pytest.mark.parametrize("head_dim", [64, 80])
def test_new_tokens_are_written_in_their_places(head_dim: int, dtype: str) -> None:
    found, expected = cache_of(dtype, 1, head_dim), cache_of(dtype, 1, head_dim)
    wide = torch.randn(6, 4 + 9, head_dim, generator=torch.Generator().manual_seed(3))
    wide = wide.to(found.tensor.dtype)
    key, value = wide[:, 5:9], wide[:, 9:]
    slots = torch.tensor([54, 0, 17, 18, 5, 4])
    write_kv(found.tensor[1], slots, key, value)
    base.write_kv(expected.tensor[1], slots, key, value)
    assert torch.equal(found.tensor, expected.tensor)


def test_tokens_that_pad_a_batch_are_not_written() -> None:
    cache, before = cache_of("bfloat16", seed=1), cache_of("bfloat16", seed=1)
    key = torch.ones(3, 4, 80, dtype=torch.bfloat16)
    write_kv(cache.tensor[0], torch.tensor([-1, 3, -1]), key, key)
    before.tensor[0].flatten(1, 2)[:, 3] = 1
    assert torch.equal(cache.tensor, before.tensor)
