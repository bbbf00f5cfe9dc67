from hypothesis import given
from hypothesis import strategies as st

from decode_worker.scheduler import DecodeScheduler
from splitserve.request import SampledToken
from splitserve.scheduling.block_manager import BlockManager
from splitserve.scheduling.sequence import Sequence
from tests.unit.requests import make_request


def running(scheduler: DecodeScheduler, name: str, num_tokens: int, order: int) -> Sequence:
    """A sequence whose prompt has KV and whose first token is known."""
    request = make_request(name, num_tokens, max_tokens=1000)
    sequence = Sequence(request, request.choices, list(request.token_ids), order)
    block_ids = scheduler.blocks.allocate(num_tokens // 4 + 1)
    assert block_ids is not None
    sequence.block_ids = block_ids
    sequence.num_computed = num_tokens
    sequence.append(SampledToken(1))
    scheduler.begin(sequence)
    return sequence


def step(scheduler: DecodeScheduler) -> list[str]:
    plan = scheduler.schedule()
    scheduler.computed(plan)
    for planned in plan:
        if planned.samples:
            planned.sequence.append(SampledToken(1))
    scheduler.blocks.check()
    return [p.sequence.request.key.request_id for p in plan]


def test_the_youngest_is_preempted_and_comes_back_when_there_is_room() -> None:
    scheduler = DecodeScheduler(BlockManager(4), 4, 64)
    old = running(scheduler, "old", 7, 1)
    young = running(scheduler, "young", 7, 2)
    assert step(scheduler) == ["old", "young"]
    assert step(scheduler) == ["old"]  # both need a block, none is free
    assert scheduler.num_preemptions == 1
    assert (young.block_ids, young.num_computed) == ([], 0)
    scheduler.finish(old)
    assert step(scheduler) == ["young"]
    assert young.num_computed == 9


def test_the_oldest_alone_waits_for_reserved_blocks() -> None:
    scheduler = DecodeScheduler(BlockManager(4), 4, 64)
    running(scheduler, "a", 7, 1)
    scheduler.blocks.reserve("transfer", 2)
    assert step(scheduler) == ["a"]
    assert step(scheduler) == []
    scheduler.blocks.cancel("transfer")
    assert step(scheduler) == ["a"]


def test_answers_go_before_prompts_in_the_budget() -> None:
    scheduler = DecodeScheduler(BlockManager(20), 4, 8)
    request = make_request("prompt", 30)
    prompt = Sequence(request, request.choices, list(request.token_ids), order=1)
    prompt.block_ids = scheduler.blocks.allocate(8) or []
    scheduler.begin(prompt)
    running(scheduler, "answer", 3, 2)
    plan = scheduler.schedule()
    assert [(p.sequence.request.key.request_id, p.num_tokens) for p in plan] == [
        ("answer", 1),
        ("prompt", 7),
    ]


def test_release_frees_running_and_preempted_choices() -> None:
    scheduler = DecodeScheduler(BlockManager(4), 4, 64)
    a = running(scheduler, "a", 7, 1)
    b = running(scheduler, "b", 7, 2)
    step(scheduler)
    step(scheduler)
    assert scheduler.num_preempted == 1
    for sequence in (a, b):
        assert scheduler.release(sequence.request.key) == [sequence]
    assert scheduler.blocks.counts.free == 4


def test_release_takes_older_attempts_along_and_no_newer_one() -> None:
    scheduler = DecodeScheduler(BlockManager(4), 4, 64)
    sequence = running(scheduler, "a", 7, 1)
    sequence.request = sequence.request.at_attempt(2)
    key = sequence.request.key
    assert scheduler.release(key._replace(attempt=1)) == []
    assert scheduler.release(key._replace(request_id="b", attempt=9)) == []
    assert scheduler.release(key._replace(attempt=3)) == [sequence]
    assert scheduler.blocks.counts.free == 4


@given(
    st.lists(st.tuples(st.integers(1, 11), st.integers(1, 20)), min_size=1, max_size=10),
    st.integers(8, 16),
    st.integers(1, 16),
)
def test_everyone_finishes_with_exactly_its_tokens(
    jobs: list[tuple[int, int]], num_blocks: int, budget: int
) -> None:
    """A pool that holds one answer whole is enough for any number of them."""
    scheduler = DecodeScheduler(BlockManager(num_blocks), 4, budget)
    waiting = list(enumerate(jobs))
    wanted = {str(n): max_tokens for n, (_, max_tokens) in waiting}
    got: dict[str, int] = {}
    for _ in range(5000):
        while waiting:
            number, (length, _) = waiting[0]
            spare = 0 if scheduler.num_preempted else scheduler.spare_blocks
            if length // 4 + 1 > spare:
                break
            running(scheduler, str(number), length, number)
            waiting.pop(0)
        step(scheduler)
        for sequence in scheduler.sequences:
            name = sequence.request.key.request_id
            if sequence.num_output_tokens >= wanted[name] and sequence.num_uncomputed == 1:
                got[name] = sequence.num_output_tokens
                scheduler.release(sequence.request.key)
        if not waiting and not scheduler.sequences:
            break
    assert set(got) == set(wanted)
    assert scheduler.blocks.counts.free == num_blocks
