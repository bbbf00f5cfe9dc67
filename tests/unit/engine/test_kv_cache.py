from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
import torch

from kv_transfer.base import KVStore
from splitserve.config import KVLayout
from splitserve.engine.kv_cache import KVCache
from splitserve.errors import ConfigError
from splitserve.wire.messages import Region
from tests.fake_store import FakeStore, random_region

NUM_BLOCKS = 24
LAYOUTS = [
    KVLayout("bfloat16", num_layers=5, num_kv_heads=3, head_dim=8, block_size=16),
    KVLayout("float32", num_layers=2, num_kv_heads=1, head_dim=6, block_size=5),
]


def filled(layout: KVLayout, seed: int = 0) -> KVCache:
    cache = KVCache(layout, NUM_BLOCKS)
    generator = torch.Generator().manual_seed(seed)
    cache.tensor.copy_(torch.randn(cache.tensor.shape, generator=generator))
    return cache


def whole(layout: KVLayout, num_tokens: int) -> Region:
    return Region(0, layout.num_layers, 0, num_tokens, 0, layout.num_kv_heads)


def scattered(rng: random.Random, count: int) -> list[int]:
    """Block ids with neighbours among them, and gaps."""
    ids = rng.sample(range(NUM_BLOCKS), count)
    return sorted(ids) if rng.random() < 0.5 else ids


def as_fake(cache: KVCache) -> FakeStore:
    """The same numbers in the store that other tests trust, which copies token by token."""
    store = FakeStore(cache.layout, NUM_BLOCKS)
    bits = torch.int32 if cache.layout.bytes_per_number == 4 else torch.int16
    numbers = cache.tensor.view(bits).numpy().transpose(2, 0, 1, 3, 4, 5)
    store.blocks[:] = numbers.view(store.blocks.dtype)
    return store


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.dtype)
@pytest.mark.parametrize("seed", range(20))
def test_read_and_write_agree_with_a_token_by_token_copy(layout: KVLayout, seed: int) -> None:
    rng = random.Random(seed)
    source, target = filled(layout, 1), filled(layout, 2)
    from_ids, to_ids = scattered(rng, 6), scattered(rng, 6)
    region = random_region(rng, 6 * layout.block_size - 2, layout)
    oracle = as_fake(target)

    data = source.read(from_ids, region)
    assert data.tobytes() == as_fake(source).read(from_ids, region).tobytes()
    assert data.format == "B" and data.ndim == 1 and data.c_contiguous

    target.write(to_ids, region, data)
    oracle.write(to_ids, region, data)
    assert np.array_equal(as_fake(target).blocks, oracle.blocks)  # and nothing else changed


def test_it_is_a_store_for_transfers() -> None:
    store: KVStore = filled(LAYOUTS[0])
    assert store.layout == LAYOUTS[0]


def test_a_read_is_a_copy() -> None:
    cache = filled(LAYOUTS[0])
    data = cache.read([3], whole(LAYOUTS[0], 16))
    before = data.tobytes()
    cache.tensor.zero_()
    assert data.tobytes() == before


def test_memory_is_laid_out_as_promised() -> None:
    layout = LAYOUTS[0]
    cache = KVCache(layout, NUM_BLOCKS)
    assert cache.tensor.shape == (5, 2, NUM_BLOCKS, 16, 3, 8)
    cache.tensor[4, 1, 7, 2, 1] = torch.arange(8, dtype=torch.bfloat16)
    data = cache.read([0, 7], Region(4, 5, 18, 19, 1, 2))
    numbers = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(2, 8)
    assert numbers.tolist() == [[0.0] * 8, list(map(float, range(8)))]


@pytest.mark.parametrize(
    "region",
    [
        Region(0, 6, 0, 4, 0, 3),  # layers
        Region(-1, 5, 0, 4, 0, 3),
        Region(2, 2, 0, 4, 0, 3),
        Region(0, 5, 0, 33, 0, 3),  # tokens: two blocks hold 32
        Region(0, 5, 8, 4, 0, 3),
        Region(0, 5, 0, 4, 0, 4),  # heads
        Region(0, 5, 0, 4, 2, 1),
    ],
)
def test_a_region_outside_is_refused(region: Region) -> None:
    cache = filled(LAYOUTS[0])
    before = cache.tensor.clone()
    with pytest.raises(ValueError, match="are not in"):
        cache.read([1, 2], region)
    with pytest.raises(ValueError, match="are not in"):
        cache.write([1, 2], region, memoryview(bytes(64)))
    assert torch.equal(cache.tensor, before)


@pytest.mark.parametrize("size_change", [-1, 1, -960])
def test_a_wrong_size_is_refused(size_change: int) -> None:
    cache = filled(LAYOUTS[0])
    before = cache.tensor.clone()
    region = whole(LAYOUTS[0], 4)
    size = 4 * LAYOUTS[0].token_bytes
    with pytest.raises(ValueError, match="bytes for a region"):
        cache.write([1], region, memoryview(bytes(size + size_change)))
    assert torch.equal(cache.tensor, before)


@pytest.mark.parametrize("block_id", [-1, NUM_BLOCKS])
def test_a_block_outside_is_refused(block_id: int) -> None:
    with pytest.raises(ValueError, match="block ids"):
        filled(LAYOUTS[0]).read([1, block_id], whole(LAYOUTS[0], 20))


def test_copy_blocks_reads_before_it_writes() -> None:
    cache = filled(LAYOUTS[1])
    before = cache.tensor.clone()
    cache.copy_blocks([(1, 2), (2, 1), (5, 9)])
    cache.copy_blocks([])
    moved = before.clone()
    moved[:, :, [2, 1, 9]] = before[:, :, [1, 2, 5]]
    assert torch.equal(cache.tensor, moved)


def test_other_threads_run_during_a_copy() -> None:
    """A copy of a hundred megabytes on another thread must not stop this one."""
    layout = KVLayout("float32", num_layers=4, num_kv_heads=4, head_dim=64, block_size=16)
    cache = KVCache(layout, 1024)
    ids, region = range(1024), whole(layout, 1024 * 16)
    size = layout.token_bytes * 1024 * 16
    done = threading.Event()

    def copy() -> None:
        for _ in range(3):
            cache.write(ids, region, memoryview(cache.read(ids, region)))
        done.set()

    thread = threading.Thread(target=copy)
    turns_during, started = 0, time.perf_counter()
    thread.start()
    while not done.wait(timeout=0.0005) and time.perf_counter() - started < 60:
        turns_during += 1
    thread.join(timeout=60)
    assert done.is_set() and size > 100e6
    assert turns_during > 20


def test_more_blocks_than_memory_says_how_much_they_take() -> None:
    with pytest.raises(ConfigError, match=r"num_blocks 4000000000000: their KV takes \d+\.\d GiB"):
        KVCache(LAYOUTS[0], 4 * 10**12)
