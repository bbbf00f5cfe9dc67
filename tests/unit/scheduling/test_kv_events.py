from splitserve.scheduling.block_manager import BlockManager
from splitserve.scheduling.kv_events import (
    AllCleared,
    BlockRemoved,
    BlockStored,
    KVEventLog,
    KVEvents,
)
from splitserve.scheduling.prefix_cache import PrefixCache
from splitserve.scheduling.prefix_key import prefix_keys, root_key


def log_of(count: int, capacity: int) -> KVEventLog:
    log = KVEventLog(capacity)
    for number in range(1, count + 1):
        log.append(BlockRemoved(bytes([number])))
    return log


def test_a_reader_gets_what_it_has_not_seen() -> None:
    log = log_of(5, 8)
    assert log.since(3) == KVEvents(5, (BlockRemoved(b"\x04"), BlockRemoved(b"\x05")))
    assert log.since(5) == KVEvents(5, ())
    log.append(AllCleared())
    assert log.since(5) == KVEvents(6, (AllCleared(),))


def test_the_log_is_bounded_and_tells_whoever_fell_behind() -> None:
    log = log_of(9, 4)
    assert log.since(4) is None
    events = log.since(5)
    assert events is not None
    assert [event.key for event in events.events if isinstance(event, BlockRemoved)] == [
        b"\x06",
        b"\x07",
        b"\x08",
        b"\x09",
    ]


def test_a_number_of_another_log_is_not_taken_for_one_of_this() -> None:
    assert log_of(3, 8).since(4) is None
    assert log_of(0, 8).since(0) == KVEvents(0, ())


def cache_of(num_blocks: int) -> tuple[BlockManager, PrefixCache]:
    blocks = BlockManager(num_blocks)
    return blocks, PrefixCache(blocks, 4)


def compute(blocks: BlockManager, cache: PrefixCache, token_ids: list[int]) -> None:
    """A prompt from its arrival to its end; nothing of it is cached yet."""
    block_ids = blocks.allocate(len(token_ids) // 4)
    assert block_ids is not None
    cache.insert(cache.match(token_ids, 0).node, token_ids, block_ids, len(token_ids))
    blocks.free(block_ids)


def test_a_router_hears_of_each_block_that_comes_and_goes() -> None:
    blocks, cache = cache_of(3)
    keys = prefix_keys(range(8), 4)
    compute(blocks, cache, list(range(8)))
    stored = (BlockStored(keys[0], root_key()), BlockStored(keys[1], keys[0]))
    assert cache.events_since(0) == KVEvents(2, stored)
    blocks.allocate(2)
    assert cache.events_since(2) == KVEvents(3, (BlockRemoved(keys[1]),))
    cache.clear()
    assert cache.events_since(3) == KVEvents(4, (AllCleared(),))


def test_a_router_that_fell_behind_hears_all_that_is_here() -> None:
    blocks, cache = cache_of(4)
    for first in range(0, 300, 100):
        compute(blocks, cache, list(range(first, first + 16)))
    keys = prefix_keys(range(200, 216), 4)
    stored = [BlockStored(*pair) for pair in zip(keys, [root_key(), *keys], strict=False)]
    assert cache.events_since(1) == KVEvents(20, (AllCleared(), *stored))
    assert cache.events_since(99) == KVEvents(20, (AllCleared(), *stored)), "of another log"
