"""The cache of a GPU, on tensors of the CPU, held to the plain one."""

from __future__ import annotations

import pytest
import torch

from splitserve.config import KVLayout
from splitserve.engine.gpu.kv_cache import GpuKVCache
from splitserve.engine.kv_cache import KVCache, PagedKV
from tests.kernels.boxes import Box
from tests.kernels.interpreted.test_kv import BLOCK_IDS, BOXES

DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
NUM_BLOCKS = 11


def caches(dtype: str, seed: int = 1) -> tuple[GpuKVCache, KVCache]:
    """Both hold the same random numbers."""
    layout = KVLayout(dtype, 3, 4, 80, 5)
    found, expected = GpuKVCache(layout, NUM_BLOCKS, torch.device("cpu")), KVCache(layout, 11)
    numbers = torch.randn(found.tensor.shape, generator=torch.Generator().manual_seed(seed))
    for cache in (found, expected):
        cache.tensor.copy_(numbers)
    return found, expected


@DTYPES
@pytest.mark.parametrize("box", BOXES, ids=str)
def test_it_reads_and_writes_the_same_bytes(box: Box, dtype: str) -> None:
    found, expected = caches(dtype)
    data = found.read(BLOCK_IDS, box)
    assert data == expected.read(BLOCK_IDS, box) and data.contiguous and data.format == "B"
    other = caches(dtype, seed=2)[1].read(BLOCK_IDS, box)
    for cache in (found, expected):
        cache.write(BLOCK_IDS, box, memoryview(bytes(other)))
    assert torch.equal(found.tensor, expected.tensor)


def test_what_was_read_is_a_copy() -> None:
    found, _ = caches("float32")
    data = found.read(BLOCK_IDS, BOXES[0])
    before = bytes(data)
    found.tensor.zero_()
    found.read(BLOCK_IDS, BOXES[0])
    assert data == before


def test_blocks_are_copied_and_warming_up_changes_nothing() -> None:
    found, expected = caches("bfloat16")
    found.warm_up()
    for cache in (found, expected):
        cache.copy_blocks([(0, 3), (3, 4)])
        cache.copy_blocks([])
    assert torch.equal(found.tensor, expected.tensor)


@pytest.mark.parametrize("kind", [0, 1])
def test_what_does_not_fit_is_refused_alike(kind: int) -> None:
    cache: PagedKV = caches("float32")[kind]
    before = cache.tensor.clone()
    for box, message in ((Box(0, 4, 0, 5, 0, 4), "layers"), (Box(0, 1, 0, 21, 0, 4), "tokens")):
        with pytest.raises(ValueError, match=message):
            cache.read(BLOCK_IDS, box)
    with pytest.raises(ValueError, match="block ids"):
        cache.read((NUM_BLOCKS, 1), BOXES[1])
    with pytest.raises(ValueError, match=r"3 bytes for a region of \d+"):
        cache.write(BLOCK_IDS, BOXES[0], memoryview(b"abc"))
    assert torch.equal(cache.tensor, before)
