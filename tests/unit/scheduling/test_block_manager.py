import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from splitserve.scheduling.block_manager import BlockManager, blocks_for
from splitserve.scheduling.prefix_cache import PrefixCache


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks


def test_allocation_is_all_or_nothing() -> None:
    manager = BlockManager(4)
    assert manager.allocate(5) is None
    assert manager.num_free == 4
    assert sorted(manager.allocate(4) or []) == [0, 1, 2, 3]
    assert manager.allocate(1) is None


def test_a_forked_block_is_free_only_after_its_last_reference() -> None:
    manager = BlockManager(2)
    block_ids = manager.allocate(1)
    assert block_ids is not None
    manager.fork(block_ids)
    manager.free(block_ids)
    assert manager.counts.used == 1
    manager.free(block_ids)
    assert manager.counts.free == 2


def test_freeing_a_free_block_is_our_bug() -> None:
    manager = BlockManager(2)
    with pytest.raises(AssertionError, match="freed twice"):
        manager.free([0])


def test_check_notices_a_block_held_twice() -> None:
    manager = BlockManager(2)
    manager._free.append(0)
    with pytest.raises(AssertionError, match="lost or held twice"):
        manager.check()


def test_quarantined_blocks_are_nobodys_until_their_writer_has_ended() -> None:
    manager = BlockManager(5)
    for key, writer in (("a", "dead"), ("b", "dead"), ("c", "frozen")):
        manager.reserve(key, 1)
        manager.quarantine(key, writer)
    assert manager.allocate(3) is None
    counts = manager.counts
    assert (counts.free, counts.reserved, counts.quarantined) == (2, 3, 3)
    manager.end_quarantine("dead")
    manager.end_quarantine("nobody")
    assert (manager.counts.free, manager.counts.quarantined) == (4, 1)
    manager.check()


def with_cached(num_blocks: int, num_cached: int) -> BlockManager:
    """Of so many blocks, some with nobody's reference but something in them."""
    manager = BlockManager(num_blocks)
    cache = PrefixCache(manager, 1)
    token_ids = list(range(num_cached))
    block_ids = manager.allocate(num_cached)
    assert block_ids is not None
    cache.insert(cache.match(token_ids, 0).node, token_ids, block_ids, num_cached)
    manager.free(block_ids)
    return manager


def test_a_cached_block_is_neither_free_nor_used_and_can_be_had() -> None:
    manager = with_cached(5, 3)
    counts = manager.counts
    assert (counts.free, counts.used, counts.reserved, counts.cached) == (2, 0, 0, 3)
    assert manager.num_free == 5
    manager.check()


def test_free_blocks_are_taken_before_cached_ones() -> None:
    manager = with_cached(5, 3)
    assert manager.allocate(2) is not None
    assert manager.counts.cached == 3
    assert manager.reserve("transfer", 1) is not None
    assert manager.counts.cached == 2
    assert manager.allocate(2) is not None
    assert manager.allocate(1) is None
    manager.check()


def test_a_cached_block_that_is_read_again_is_used_and_can_not_be_had() -> None:
    manager = with_cached(3, 1)
    manager.fork([0])
    assert (manager.counts.used, manager.counts.cached, manager.num_free) == (1, 0, 2)
    manager.free([0])
    assert (manager.counts.used, manager.counts.cached, manager.num_free) == (0, 1, 3)


def test_a_free_block_can_not_be_read_or_kept() -> None:
    manager = with_cached(3, 1)
    with pytest.raises(AssertionError, match="not in use"):
        manager.keep(2)
    with pytest.raises(AssertionError, match="not in use"):
        manager.fork([2])


def test_check_notices_a_cached_block_that_nothing_is_known_of() -> None:
    manager = with_cached(3, 1)
    block_ids = manager.allocate(1)
    assert block_ids is not None
    manager.keep(block_ids[0])
    with pytest.raises(AssertionError, match="not in the tree"):
        manager.check()


class Blocks(RuleBasedStateMachine):
    """Any order of operations keeps every block in exactly one state."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(12)
        self.held: list[list[int]] = []
        self.reservations: list[int] = []
        self.next_key = 0

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        free = self.manager.num_free
        block_ids = self.manager.allocate(count)
        assert (block_ids is None) == (count > free)
        if block_ids:
            self.held.append(block_ids)

    @rule(count=st.integers(0, 6))
    def reserve(self, count: int) -> None:
        self.next_key += 1
        if self.manager.reserve(self.next_key, count) is not None:
            self.reservations.append(self.next_key)

    @precondition(lambda self: self.reservations)
    @rule(data=st.data(), end=st.sampled_from(["commit", "cancel", "quarantine"]))
    def settle(self, data: st.DataObject, end: str) -> None:
        key = data.draw(st.sampled_from(self.reservations))
        self.reservations.remove(key)
        if end == "commit":
            self.held.append(self.manager.commit(key))
        elif end == "cancel":
            self.manager.cancel(key)
        else:
            self.manager.quarantine(key, key % 2)

    @rule(writer=st.integers(0, 1))
    def end_quarantine(self, writer: int) -> None:
        self.manager.end_quarantine(writer)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.sampled_from(self.held))
        self.manager.fork(block_ids)
        self.held.append(list(block_ids))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.manager.free(self.held.pop(index))

    @invariant()
    def adds_up(self) -> None:
        self.manager.check()
        counts = self.manager.counts
        assert counts.free + counts.used + counts.reserved == counts.total
        assert counts.used == len({b for ids in self.held for b in ids})


TestBlocks = Blocks.TestCase
