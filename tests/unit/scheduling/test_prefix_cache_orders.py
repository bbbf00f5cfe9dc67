"""Any order of operations, against a model that searches everything anew each time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from splitserve.scheduling.block_manager import BlockManager, blocks_for
from splitserve.scheduling.kv_events import BlockRemoved, BlockStored
from splitserve.scheduling.prefix_cache import PrefixCache, Prospect
from splitserve.scheduling.prefix_key import prefix_keys
from splitserve.scheduling.prefix_tree import PrefixNode

SIZE = 2
NUM_BLOCKS = 14
Prefix = tuple[str, tuple[int, ...]]  # a namespace, and all tokens to the end of a block

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=11)
namespaces = st.sampled_from(["", "salt"])


@dataclass(eq=False)
class Running:
    """A sequence; while its `transfer` is on its way it has only its first blocks."""

    namespace: str
    token_ids: list[int]
    block_ids: list[int]
    node: PrefixNode
    num_computed: int
    num_inserted: int  # blocks
    num_clears: int  # before it began
    transfer: int | None = None

    def prefix(self, index: int) -> Prefix:
        """What the block at this index holds when it is full."""
        return self.namespace, tuple(self.token_ids[: (index + 1) * SIZE])


class Model:
    """A dict of whole prefixes, and since when nobody has used each or one behind it."""

    def __init__(self) -> None:
        self.cached: dict[Prefix, int] = {}
        self.idle: dict[Prefix, tuple[int, int]] = {}
        self.num_clears = 0
        self.now = 0

    def longest(self, namespace: str, token_ids: list[int], limit: int) -> list[Prefix]:
        found: list[Prefix] = []
        for end in range(SIZE, limit + 1, SIZE):
            prefix = (namespace, tuple(token_ids[:end]))
            if prefix not in self.cached:
                break
            found.append(prefix)
        return found

    def insert(self, running: Running) -> None:
        if running.num_clears != self.num_clears:
            return
        for index in range(running.num_inserted, running.num_computed // SIZE):
            block_id = running.block_ids[index]
            if self.cached.setdefault(running.prefix(index), block_id) != block_id:
                return  # another's
            running.num_inserted = index + 1

    def evict(self, count: int) -> None:
        for prefix in sorted(self.idle, key=lambda p: self.idle[p])[:count]:
            del self.cached[prefix], self.idle[prefix]

    def clear(self) -> None:
        self.cached.clear()
        self.idle.clear()
        self.num_clears += 1

    def settle(self, running: list[Running]) -> None:
        """Who uses what has changed."""
        self.now += 1
        references = Counter(block_id for r in running for block_id in r.block_ids)
        used = [prefix for prefix, block_id in self.cached.items() if references[block_id]]
        for namespace, tokens in self.cached:
            if any(n == namespace and t[: len(tokens)] == tokens for n, t in used):
                self.idle.pop((namespace, tokens), None)
            else:
                self.idle.setdefault((namespace, tokens), (self.now, -len(tokens)))


class Follower:
    """What a router knows of the cache."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.last = 0

    def read(self, cache: PrefixCache) -> None:
        self.last, events = cache.events_since(self.last)
        for event in events:
            if isinstance(event, BlockStored):
                self.keys.add(event.key)
            elif isinstance(event, BlockRemoved):
                self.keys.remove(event.key)
            else:
                self.keys.clear()


class Orders(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS)
        self.cache = PrefixCache(self.blocks, SIZE)
        self.model = Model()
        self.running: list[Running] = []
        self.contents: dict[int, Prefix] = {}  # what is really in each block
        self.followers = Follower(), Follower()  # one that hurries, one that does not
        self.num_transfers = 0

    @rule(namespace=namespaces, token_ids=prompts)
    def begin(self, namespace: str, token_ids: list[int]) -> None:
        running = self.matched(namespace, token_ids, len(token_ids) - 1)
        if not self.allocated(running, blocks_for(len(token_ids), SIZE)):
            self.finish(running)

    @rule(namespace=namespaces, token_ids=prompts)
    def grant(self, namespace: str, token_ids: list[int]) -> None:
        running = self.matched(namespace, token_ids, len(token_ids))
        self.num_transfers += 1
        count = len(token_ids) // SIZE + 1 - len(running.block_ids)
        self.expect_eviction(count)
        if self.blocks.reserve(self.num_transfers, count) is None:
            self.finish(running)
        else:
            running.transfer = self.num_transfers

    @precondition(lambda self: self.some(receiving=True))
    @rule(data=st.data(), end=st.sampled_from(["commit", "cancel", "quarantine"]))
    def settle_transfer(self, data: st.DataObject, end: str) -> None:
        running = data.draw(st.sampled_from(self.some(receiving=True)))
        if end == "commit":
            running.block_ids += self.blocks.commit(running.transfer)
            running.transfer = None
            self.written(running, len(running.token_ids))
        elif end == "cancel":
            self.blocks.cancel(running.transfer)
            self.finish(running)
        else:
            self.blocks.quarantine(running.transfer, "dead")
            self.finish(running)

    @rule()
    def end_quarantine(self) -> None:
        self.blocks.end_quarantine("dead")

    @precondition(lambda self: self.some())
    @rule(data=st.data(), count=st.integers(1, 5))
    def compute(self, data: st.DataObject, count: int) -> None:
        running = data.draw(st.sampled_from(self.some()))
        self.written(running, min(len(running.token_ids), running.num_computed + count))

    @precondition(lambda self: self.some())
    @rule(data=st.data(), token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def decode(self, data: st.DataObject, token_ids: list[int]) -> None:
        running = data.draw(st.sampled_from(self.some()))
        self.written(running, len(running.token_ids))
        for token_id in token_ids:
            if not self.allocated(running, blocks_for(len(running.token_ids) + 1, SIZE)):
                return
            running.token_ids.append(token_id)
            self.written(running, len(running.token_ids))

    @precondition(lambda self: self.some())
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        running = data.draw(st.sampled_from(self.some()))
        self.written(running, len(running.token_ids))
        shared = running.block_ids[: len(running.token_ids) // SIZE]
        self.blocks.fork(shared)
        other = replace(running, token_ids=list(running.token_ids), block_ids=list(shared))
        other.num_computed = len(shared) * SIZE
        self.running.append(other)
        self.model.settle(self.running)
        if not self.allocated(other, blocks_for(len(other.token_ids), SIZE)):
            self.finish(other)

    @precondition(lambda self: self.some())
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.finish(data.draw(st.sampled_from(self.some())))

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.model.clear()

    @rule()
    def read_late(self) -> None:
        self.followers[1].read(self.cache)
        assert self.followers[1].keys == self.keys()

    def some(self, receiving: bool = False) -> list[Running]:
        return [r for r in self.running if (r.transfer is not None) == receiving]

    def keys(self) -> set[bytes]:
        return {prefix_keys(tokens, SIZE, name)[-1] for name, tokens in self.model.cached}

    def matched(self, namespace: str, token_ids: list[int], limit: int) -> Running:
        expected = self.model.longest(namespace, token_ids, limit)
        num_idle = sum(prefix in self.model.idle for prefix in expected)
        num_free = self.blocks.num_free
        prospect = self.cache.peek(token_ids, limit, namespace)
        assert prospect == Prospect(len(expected) * SIZE, num_idle)
        match = self.cache.match(token_ids, limit, namespace)
        assert match.block_ids == [self.model.cached[prefix] for prefix in expected]
        assert [self.contents[block_id] for block_id in match.block_ids] == expected
        assert match.num_tokens == prospect.num_tokens <= limit
        assert self.blocks.num_free == num_free - num_idle
        running = Running(
            namespace,
            list(token_ids),
            list(match.block_ids),
            match.node,
            match.num_tokens,
            len(expected),
            self.model.num_clears,
        )
        self.running.append(running)
        self.model.settle(self.running)
        return running

    def allocated(self, running: Running, num_blocks: int) -> bool:
        count = num_blocks - len(running.block_ids)
        fits = self.expect_eviction(count)
        block_ids = self.blocks.allocate(count)
        assert (block_ids is not None) == fits
        running.block_ids += block_ids or []
        return fits

    def expect_eviction(self, count: int) -> bool:
        """Whether so many blocks can be had; if so, the model gives up what it takes."""
        free = self.blocks.counts.free
        fits = count <= free + len(self.model.idle)
        if fits:
            self.model.evict(count - free if count > free else 0)
        return fits

    def written(self, running: Running, num_tokens: int) -> None:
        """Its KV is in its blocks up to this token, and full blocks are cached."""
        for index in range(running.num_computed // SIZE, blocks_for(num_tokens, SIZE)):
            block_id = running.block_ids[index]
            assert block_id not in self.model.cached.values(), "a cached block is written to"
            self.contents[block_id] = running.prefix(index)
        running.num_computed = num_tokens
        node, block_ids = running.node, running.block_ids
        running.node = self.cache.insert(node, running.token_ids, block_ids, num_tokens)
        self.model.insert(running)
        assert running.node.depth == running.num_inserted
        self.model.settle(self.running)

    def finish(self, running: Running) -> None:
        self.running.remove(running)
        self.blocks.free(running.block_ids)
        self.model.settle(self.running)

    @invariant()
    def adds_up(self) -> None:
        self.blocks.check()
        counts = self.blocks.counts
        used = {block_id for r in self.running for block_id in r.block_ids}
        cached = set(self.model.cached.values()) - used
        assert (counts.used, counts.cached) == (len(used), len(cached))
        assert counts.free + counts.used + counts.cached + counts.reserved == counts.total
        assert len(self.model.idle) == counts.cached, "nobody refers to it, yet it is held"
        assert self.blocks.num_free == counts.free + counts.cached

    @invariant()
    def a_reader_knows_exactly_what_is_here(self) -> None:
        self.followers[0].read(self.cache)
        assert self.followers[0].keys == self.keys()

    def teardown(self) -> None:
        for running in self.some(receiving=True):
            self.blocks.cancel(running.transfer)
        for running in list(self.running):
            self.finish(running)
        self.blocks.end_quarantine("dead")
        counts = self.blocks.counts
        assert counts.free + counts.cached == counts.total
        assert self.blocks.num_free == counts.total, "all that is cached can be evicted"
        self.cache.clear()
        self.blocks.check()
        assert self.blocks.counts.free == counts.total


TestOrders = Orders.TestCase
