import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from splitserve.scheduling.block_manager import BlockManager
from splitserve.scheduling.prefix_cache import PrefixCache
from splitserve.scheduling.prefix_tree import PrefixNode

PROMPT = list(range(12))
OTHER_TAIL = [*PROMPT[:8], 90, 91, 92, 93]


def cache_of(num_blocks: int = 16) -> tuple[BlockManager, PrefixCache]:
    blocks = BlockManager(num_blocks)
    return blocks, PrefixCache(blocks, 4)


def test_a_prompt_waits_for_the_one_that_brings_its_next_block() -> None:
    _, cache = cache_of()
    cache.claim("first", PROMPT)
    assert cache.blocked_by(OTHER_TAIL, 11) == "first"
    assert cache.is_claiming("first")
    cache.release("first")
    assert cache.blocked_by(OTHER_TAIL, 11) is None
    assert not cache.is_claiming("first")


def test_nobody_waits_for_what_is_here_or_is_not_claimed() -> None:
    blocks, cache = cache_of()
    cache.claim("first", PROMPT)
    block_ids = blocks.allocate(3)
    assert block_ids is not None
    cache.insert(cache.match(PROMPT, 12).node, PROMPT, block_ids, 8)
    assert cache.blocked_by(OTHER_TAIL, 12) is None, "its tail is its own"
    assert cache.blocked_by(PROMPT, 12) == "first"
    assert cache.blocked_by(PROMPT, 11) is None, "it computes the last block in any case"
    assert cache.blocked_by([7, *PROMPT], 13) is None
    assert cache.blocked_by(PROMPT[:3], 3) is None, "no full block"


def test_namespaces_do_not_wait_for_each_other() -> None:
    _, cache = cache_of()
    cache.claim("first", PROMPT, "salt")
    assert cache.blocked_by(PROMPT, 11) is None
    assert cache.blocked_by(PROMPT, 11, "salt") == "first"


def test_a_partial_block_is_claimed_by_nobody() -> None:
    blocks, cache = cache_of()
    cache.claim("first", PROMPT[:7])
    assert cache.blocked_by(PROMPT, 11) == "first"
    block_ids = blocks.allocate(1)
    assert block_ids is not None
    cache.insert(cache.match(PROMPT, 0).node, PROMPT, block_ids, 4)
    assert cache.blocked_by(PROMPT, 11) is None


def test_who_claims_waits_for_older_claims_only() -> None:
    _, cache = cache_of()
    for key in ("first", "second", "third"):
        cache.claim(key, PROMPT)
    assert cache.blocked_by(PROMPT, 11, key="first") is None
    assert cache.blocked_by(PROMPT, 11, key="third") == "first"
    cache.release("first")
    assert cache.blocked_by(PROMPT, 11, key="third") == "second"
    assert cache.blocked_by(PROMPT, 11, key="second") is None


def test_a_clear_ends_all_claims_because_none_of_them_will_bring_anything() -> None:
    _, cache = cache_of()
    cache.claim("first", PROMPT)
    cache.clear()
    assert cache.blocked_by(PROMPT, 11) is None
    cache.release("first")


class Line(RuleBasedStateMachine):
    """Prompts that wait, compute, commit and fail: nobody waits forever, nothing is done twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(400)
        self.cache = PrefixCache(self.blocks, 2)
        self.waiting: dict[int, list[int]] = {}
        self.computing: dict[int, tuple[list[int], list[int], PrefixNode]] = {}
        self.num_arrived = 0

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def arrive(self, prompt: list[int]) -> None:
        self.waiting[self.num_arrived] = prompt
        self.num_arrived += 1

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        self.try_to_admit(data.draw(st.sampled_from(sorted(self.waiting))))

    @precondition(lambda self: self.computing)
    @rule(data=st.data(), fails=st.booleans())
    def end(self, data: st.DataObject, fails: bool) -> None:
        self.finish(data.draw(st.sampled_from(sorted(self.computing))), fails)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        for key in list(self.computing):
            self.finish(key, fails=True)  # what was begun before brings nothing

    def try_to_admit(self, key: int) -> None:
        prompt = self.waiting[key]
        limit = len(prompt) - 1
        if self.cache.blocked_by(prompt, limit) is not None:
            return
        match = self.cache.match(prompt, limit)
        missing = {tuple(prompt[:end]) for end in range(match.num_tokens + 2, limit + 1, 2)}
        for other, _, _ in self.computing.values():
            assert missing.isdisjoint(tuple(other[:end]) for end in range(2, len(other), 2))
        num_blocks = -(-len(prompt) // 2) - len(match.block_ids)
        own = self.blocks.allocate(num_blocks)
        assert own is not None
        self.cache.claim(key, prompt)
        self.computing[key] = (self.waiting.pop(key), [*match.block_ids, *own], match.node)

    def finish(self, key: int, fails: bool) -> None:
        prompt, block_ids, node = self.computing.pop(key)
        if not fails:
            self.cache.insert(node, prompt, block_ids, len(prompt))
        self.cache.release(key)
        self.blocks.free(block_ids)

    @invariant()
    def waits_for_the_oldest_that_brings_the_next_block(self) -> None:
        for prompt in self.waiting.values():
            end = self.cache.peek(prompt, len(prompt) - 1).num_tokens + 2
            wanted = [
                key
                for key, (other, _, _) in self.computing.items()
                if end < len(prompt) and other[:end] == prompt[:end]
            ]
            blocker = self.cache.blocked_by(prompt, len(prompt) - 1)
            assert blocker == (wanted[0] if wanted else None)

    @invariant()
    def who_computes_waits_for_older_ones_only(self) -> None:
        for key, (prompt, _, _) in self.computing.items():
            blocker = self.cache.blocked_by(prompt, len(prompt) - 1, key=key)
            assert blocker is None or (isinstance(blocker, int) and self.is_older(blocker, key))

    def is_older(self, one: int, other: int) -> bool:
        order = list(self.computing)  # by admission
        return order.index(one) < order.index(other)

    def teardown(self) -> None:
        """Whatever state this is, those who compute now and later bring everybody through."""
        for _ in range(2 * self.num_arrived):
            for key in list(self.waiting):
                self.try_to_admit(key)
            if self.computing:
                self.finish(next(iter(self.computing)), fails=False)
        assert not self.waiting and not self.computing, "somebody waits for nobody"
        self.blocks.check()
        assert self.blocks.counts.used == 0


TestLine = Line.TestCase
