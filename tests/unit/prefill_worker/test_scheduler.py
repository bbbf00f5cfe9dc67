from hypothesis import given
from hypothesis import strategies as st

from prefill_worker.scheduler import PrefillScheduler
from splitserve.scheduling.block_manager import BlockManager
from splitserve.scheduling.prefix_cache import PrefixCache
from tests.unit.requests import make_request


def scheduler(num_blocks: int = 8, budget: int = 16, caches: bool = False) -> PrefillScheduler:
    blocks = BlockManager(num_blocks)
    return PrefillScheduler(blocks, 4, budget, PrefixCache(blocks, 4, caches))


def test_a_prompt_is_admitted_with_all_its_blocks_or_waits() -> None:
    prefill = scheduler(num_blocks=4)
    prefill.submit(make_request("a", 9))
    prefill.submit(make_request("b", 9))
    assert [s.request.key.request_id for s in prefill.admit()] == ["a"]
    assert prefill.blocks.counts.used == 3
    assert prefill.release("a")
    assert [s.request.key.request_id for s in prefill.admit()] == ["b"]


def test_several_prompts_share_a_step_and_long_ones_take_several() -> None:
    prefill = scheduler(num_blocks=20, budget=10)
    for name, length in (("a", 6), ("b", 25)):
        prefill.submit(make_request(name, length))
    prefill.admit()
    steps = []
    while plan := prefill.schedule():
        steps.append([(p.sequence.request.key.request_id, p.start, p.end) for p in plan])
        prefill.computed(plan)
    assert steps == [
        [("a", 0, 6), ("b", 0, 4)],
        [("b", 4, 14)],
        [("b", 14, 24)],
        [("b", 24, 25)],
    ]
    assert not prefill.idle  # the blocks are held until the hand-off is done


def test_release_is_idempotent_and_frees_in_every_state() -> None:
    prefill = scheduler(num_blocks=4, budget=8)
    for name in "abc":
        prefill.submit(make_request(name, 8))
    prefill.admit()
    prefill.computed(prefill.schedule())
    assert [prefill.release(name) for name in "abc"] == [True, True, True]
    assert [prefill.release(name) for name in "abc"] == [False, False, False]
    assert prefill.idle
    assert prefill.blocks.counts.free == 4


def test_another_attempt_keeps_its_place_its_blocks_and_what_is_computed() -> None:
    prefill = scheduler(num_blocks=4, budget=6)
    for name in "abc":
        prefill.submit(make_request(name, 8))
    prefill.admit()
    prefill.computed(prefill.schedule())
    blocks_of_a = list(prefill.block_ids("a"))
    for name in "ba":  # b waits for blocks behind nobody, a is half computed
        prefill.rekey(make_request(name, 8).at_attempt(3))
    assert prefill.block_ids("a") == blocks_of_a
    (chunk, second) = prefill.schedule()
    assert (chunk.sequence.request.key, chunk.start) == (("a", 3), 6)
    assert second.sequence.request.key == ("b", 3)
    prefill.release("a")
    prefill.rekey(make_request("c", 8).at_attempt(1))
    assert [s.request.key for s in prefill.admit()] == [("c", 1)]


def test_a_prompt_larger_than_the_pool_never_fits() -> None:
    prefill = scheduler(num_blocks=4)
    assert not prefill.never_fits(make_request("a", 16))
    assert prefill.never_fits(make_request("a", 17))


@given(st.lists(st.integers(1, 30), max_size=12), st.integers(1, 20))
def test_every_token_of_every_prompt_is_computed_once(lengths: list[int], budget: int) -> None:
    prefill = scheduler(num_blocks=10, budget=budget)
    for number, length in enumerate(lengths):
        prefill.submit(make_request(str(number), length))
    computed = {str(n): 0 for n in range(len(lengths))}
    while not prefill.idle:
        prefill.admit()
        plan = prefill.schedule()
        assert 0 < sum(p.num_tokens for p in plan) <= budget
        prefill.computed(plan)
        for planned in plan:
            name = planned.sequence.request.key.request_id
            assert planned.start == computed[name]
            computed[name] = planned.end
            if planned.samples:
                prefill.release(name)
        prefill.blocks.check()
    assert list(computed.values()) == lengths
    assert prefill.blocks.counts.used == 0


def test_who_begins_alike_waits_and_then_begins_behind_it() -> None:
    prefill = scheduler(num_blocks=20, caches=True)
    for name, length in (("a", 10), ("b", 12), ("c", 8)):
        prefill.submit(make_request(name, length))
    assert [s.request.key.request_id for s in prefill.admit()] == ["a"]
    prefill.computed(prefill.schedule())
    assert [(s.request.key.request_id, s.num_computed) for s in prefill.admit()] == [
        ("b", 8),
        ("c", 4),  # its last token is computed, and with it its last block
    ]
    assert [(p.start, p.end) for p in prefill.schedule()] == [(8, 12), (4, 8)]


def test_a_prompt_whose_step_failed_is_not_cached_and_wakes_who_waited() -> None:
    prefill = scheduler(num_blocks=20, caches=True)
    for name in "ab":
        prefill.submit(make_request(name, 10))
    prefill.admit()
    prefill.schedule()  # and nothing is computed
    assert prefill.release("a")
    assert [(s.request.key.request_id, s.num_cached) for s in prefill.admit()] == [("b", 0)]


def test_cached_blocks_make_room_for_other_prompts() -> None:
    prefill = scheduler(num_blocks=3, caches=True)
    prefill.submit(make_request("a", 9))
    prefill.admit()
    prefill.computed(prefill.schedule())
    assert prefill.release("a")
    assert (prefill.blocks.counts.cached, prefill.blocks.counts.free) == (2, 1)
    prefill.submit(make_request("b", 12))
    assert [s.num_cached for s in prefill.admit()] == [8]
    prefill.blocks.check()
