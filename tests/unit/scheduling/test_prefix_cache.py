from dataclasses import dataclass

import pytest

from splitserve.scheduling import prefix_tree
from splitserve.scheduling.block_manager import BlockManager, blocks_for
from splitserve.scheduling.prefix_cache import PrefixCache, Prospect
from splitserve.scheduling.prefix_tree import PrefixNode

SIZE = 16


@dataclass
class Running:
    """A sequence with its blocks: the first `num_cached_tokens` came from the cache."""

    token_ids: list[int]
    block_ids: list[int]
    node: PrefixNode
    num_cached_tokens: int


class Worker:
    """Just enough of one to use the cache as one does."""

    def __init__(self, num_blocks: int = 32) -> None:
        self.blocks = BlockManager(num_blocks)
        self.cache = PrefixCache(self.blocks, SIZE)

    def begin(self, token_ids: list[int], limit: int, namespace: str = "") -> Running:
        match = self.cache.match(token_ids, limit, namespace)
        own = self.blocks.allocate(blocks_for(len(token_ids), SIZE) - len(match.block_ids))
        assert own is not None
        return Running(token_ids, [*match.block_ids, *own], match.node, match.num_tokens)

    def computed(self, running: Running, num_tokens: int | None = None) -> None:
        num_tokens = len(running.token_ids) if num_tokens is None else num_tokens
        running.node = self.cache.insert(
            running.node, running.token_ids, running.block_ids, num_tokens
        )

    def end(self, running: Running) -> None:
        self.blocks.free(running.block_ids)
        self.blocks.check()

    def prefill(self, token_ids: list[int], namespace: str = "") -> Running:
        """From its arrival to its end."""
        running = self.begin(token_ids, len(token_ids) - 1, namespace)
        self.computed(running)
        self.end(running)
        return running

    def num_known(self, token_ids: list[int], namespace: str = "") -> int:
        return self.cache.peek(token_ids, len(token_ids), namespace).num_tokens

    def grow(self, running: Running, token_ids: list[int]) -> None:
        """Decode so many tokens more."""
        for token_id in token_ids:
            running.token_ids.append(token_id)
            if len(running.token_ids) > SIZE * len(running.block_ids):
                running.block_ids += self.blocks.allocate(1) or []
            self.computed(running)


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


@pytest.mark.parametrize("length", [16, 32, 48, 64])
def test_a_prompt_that_is_cached_whole_leaves_its_last_token_to_compute(length: int) -> None:
    """nano-vllm #144, vllm PR#11186: with every block a hit there was nothing to run, a crash."""
    worker = Worker()
    worker.prefill(prompt(length))
    again = worker.prefill(prompt(length))
    assert again.num_cached_tokens == length - SIZE


def test_the_last_block_of_a_cached_prompt_is_computed_in_a_block_of_its_own() -> None:
    """mlxcel #1760: computed into the cached block, its KV was there twice."""
    worker = Worker()
    first = worker.prefill(prompt(32))
    again = worker.begin(prompt(32), 31)
    assert again.block_ids[0] == first.block_ids[0]
    assert again.block_ids[1] != first.block_ids[1]
    worker.computed(again)
    worker.end(again)
    assert worker.begin(prompt(32), 32).block_ids == first.block_ids, "the copy stayed out"


def test_a_decode_worker_may_have_the_whole_prompt_and_pins_it() -> None:
    """vllm PR#18632, #25267: with a whole prompt cached nothing was pulled, and nothing freed."""
    worker = Worker(4)
    worker.prefill(prompt(64))
    match = worker.cache.match(prompt(64), 64)
    assert match.num_tokens == 64
    assert worker.blocks.counts.used == 4
    assert worker.blocks.allocate(1) is None, "nothing pinned is evicted"
    worker.blocks.free(match.block_ids)
    assert (worker.blocks.counts.used, worker.blocks.counts.cached) == (0, 4)


def test_a_part_that_is_cached_is_told_and_only_the_rest_is_received() -> None:
    worker = Worker()
    worker.prefill(prompt(32))
    match = worker.cache.match(prompt(64), 64)
    assert match.num_tokens == 32
    assert worker.blocks.reserve("transfer", 2) is not None
    block_ids = [*match.block_ids, *worker.blocks.commit("transfer")]
    worker.cache.insert(match.node, prompt(64), block_ids, 64)
    worker.blocks.free(block_ids)
    assert worker.num_known(prompt(64)) == 64


def test_a_failed_attempt_leaves_nothing_cached() -> None:
    worker = Worker(8)
    worker.prefill(prompt(32))
    match = worker.cache.match(prompt(64), 64)
    worker.blocks.reserve("transfer", 2)
    worker.blocks.cancel("transfer")
    worker.blocks.free(match.block_ids)
    assert worker.num_known(prompt(64)) == 32
    assert (worker.blocks.counts.cached, worker.blocks.counts.free) == (2, 6)


def test_what_is_recomputed_after_its_eviction_is_no_match() -> None:
    """vllm #25780: tokens computed anew after preemption were counted as cache hits."""
    worker = Worker(8)
    preempted = worker.begin(prompt(64), 63)
    worker.computed(preempted)
    worker.end(preempted)
    other = worker.begin(prompt(112, first=500), 111)  # takes seven blocks of the eight
    assert worker.num_known(prompt(64)) == 16
    worker.end(other)
    assert worker.begin(prompt(64), 63).num_cached_tokens == 16


def test_an_answer_is_cached_block_by_block_while_it_grows() -> None:
    worker = Worker()
    running = worker.begin(prompt(20), 20)
    worker.computed(running)
    assert worker.num_known(prompt(40)) == 16
    worker.grow(running, prompt(11, first=20))
    assert worker.num_known(prompt(40)) == 16, "the second block is not full"
    worker.grow(running, [31])
    assert worker.num_known(prompt(40)) == 32
    worker.end(running)
    assert worker.num_known(prompt(40)) == 32, "the next turn of the conversation finds it"


def test_a_block_that_is_here_already_stays_out_and_so_does_what_is_behind_it() -> None:
    """Else the cached one would be held by what is behind it, with nobody to refer to it."""
    worker = Worker()
    first, second = worker.begin(prompt(16), 15), worker.begin(prompt(16), 15)
    worker.computed(first)
    worker.computed(second)
    worker.grow(second, prompt(16, first=70))
    worker.end(first)
    counts = worker.blocks.counts
    assert (counts.used, counts.cached) == (2, 1)
    assert worker.blocks.num_free == counts.free + 1
    worker.end(second)
    assert (worker.blocks.counts.used, worker.blocks.counts.cached) == (0, 1)
    match = worker.cache.match([*prompt(16), *prompt(16, first=70)], 32)
    assert match.block_ids == [first.block_ids[0]]


def test_a_sequence_brings_its_own_block_when_the_one_it_found_was_evicted() -> None:
    worker = Worker(5)
    first, second = worker.begin(prompt(16), 15), worker.begin(prompt(16), 15)
    worker.computed(first)
    worker.computed(second)
    worker.end(first)
    worker.blocks.free(worker.blocks.allocate(4) or [])
    assert worker.num_known(prompt(16)) == 0
    worker.grow(second, prompt(16, first=16))
    assert worker.num_known(prompt(32)) == 32
    worker.end(second)


def test_choices_that_share_a_prompt_go_on_from_one_node() -> None:
    worker = Worker()
    one = worker.begin(prompt(16), 15)
    worker.computed(one)
    worker.blocks.fork(one.block_ids)
    other = Running(list(one.token_ids), list(one.block_ids), one.node, 0)
    worker.grow(one, prompt(16, first=50))
    worker.grow(other, prompt(16, first=80))
    worker.end(one)
    worker.end(other)
    assert worker.num_known([*prompt(16), *prompt(16, first=50)]) == 32
    assert worker.num_known([*prompt(16), *prompt(16, first=80)]) == 32
    assert worker.blocks.counts.cached == 3


def test_the_least_recently_used_goes_first_from_its_end() -> None:
    worker = Worker(6)
    old, new = prompt(48), prompt(48, first=500)
    worker.prefill(old)
    worker.prefill(new)
    worker.blocks.free(worker.blocks.allocate(1) or [])
    assert (worker.num_known(old), worker.num_known(new)) == (32, 48)
    worker.end(worker.begin(old, 17))  # its first block is used again
    worker.blocks.free(worker.blocks.allocate(5) or [])
    assert (worker.num_known(old), worker.num_known(new)) == (16, 0)


def test_a_look_pins_nothing_and_changes_no_order() -> None:
    worker = Worker(4)
    worker.prefill(prompt(32))
    worker.prefill(prompt(32, first=500))
    assert worker.cache.peek(prompt(32), 31) == Prospect(16, 1)
    assert worker.cache.peek(prompt(32), 32) == Prospect(32, 2)
    held = worker.begin(prompt(32), 32)
    assert worker.cache.peek(prompt(32), 32) == Prospect(32, 0), "no room goes with it now"
    worker.end(held)
    worker.cache.peek(prompt(32, first=500), 32)
    worker.blocks.allocate(2)
    assert worker.num_known(prompt(32)) == 32


def test_nothing_is_evicted_for_what_can_not_be_had_anyway() -> None:
    worker = Worker(4)
    worker.prefill(prompt(32))
    assert worker.blocks.reserve("transfer", 1) is not None
    seen = worker.cache.events_since(0).last
    assert worker.blocks.num_free == 3
    assert worker.blocks.allocate(4) is None
    assert worker.blocks.reserve("another", 4) is None
    assert worker.cache.events_since(seen).events == ()
    assert worker.blocks.reserve("another", 3) is not None, "a reservation evicts too"
    assert worker.blocks.counts.cached == 0
    worker.blocks.check()


def test_a_clear_frees_what_nobody_uses_at_once_and_the_rest_when_it_ends() -> None:
    worker = Worker(8)
    worker.prefill(prompt(32, first=500))
    running = worker.begin(prompt(20), 20)
    worker.computed(running)
    worker.cache.clear()
    counts = worker.blocks.counts
    assert (counts.used, counts.cached, counts.free) == (2, 0, 6)
    worker.blocks.check()
    worker.grow(running, prompt(30, first=20))
    assert worker.num_known(prompt(48)) == 0, "it began before the clear"
    worker.end(running)
    assert worker.blocks.counts.free == 8
    worker.prefill(prompt(20))
    assert worker.num_known(prompt(48)) == 16


def test_namespaces_share_nothing() -> None:
    worker = Worker()
    worker.prefill(prompt(32), "4:salt1:x")
    assert worker.num_known(prompt(32)) == worker.num_known(prompt(32), "7:adapter1:x") == 0
    assert worker.num_known(prompt(32), "4:salt1:x") == 32


def test_a_namespace_with_nothing_cached_costs_nothing() -> None:
    worker = Worker(2)
    for number in range(100):
        worker.prefill(prompt(32), f"salt {number}")
    assert len(worker.cache._tree._roots) == 1


def test_the_tokens_decide_and_not_their_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm GHSA-rm76-4mrf-v9r8: whoever finds a collision reads another prompt's KV."""
    monkeypatch.setattr(prefix_tree, "block_key", lambda parent, token_ids: b"\x00")
    monkeypatch.setattr(prefix_tree, "root_key", lambda namespace: b"\x00")
    worker = Worker()
    first, second = worker.prefill(prompt(48)), worker.prefill(prompt(48, first=100))
    assert worker.num_known(prompt(48), "salt") == 0
    assert worker.begin(prompt(48), 48).block_ids == first.block_ids
    assert worker.begin(prompt(48, first=100), 48).block_ids == second.block_ids
    assert worker.num_known([*prompt(16), *prompt(16, first=116)]) == 16


def test_without_it_nothing_is_ever_kept_or_waited_for() -> None:
    worker = Worker(4)
    worker.cache = PrefixCache(BlockManager(4), SIZE, enabled=False)
    worker.blocks = worker.cache._blocks
    worker.cache.claim("first", prompt(32))
    assert worker.cache.blocked_by(prompt(32), 31) is None
    worker.prefill(prompt(32))
    assert worker.prefill(prompt(32)).num_cached_tokens == 0
    worker.cache.clear()
    assert worker.blocks.counts.free == 4
