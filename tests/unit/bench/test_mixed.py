from __future__ import annotations

from splitserve.bench.mixed import MixedLoad, Send
from splitserve.bench.workloads import MixedSpec, warm_up_of

SPEC = MixedSpec(num_streams=2, period_s=8, undisturbed_s=15, duration_s=20)


def test_it_starts_with_streams_and_long_prompts_come_on_time() -> None:
    load = MixedLoad(SPEC)
    assert load.streams() == [Send("stream", 0, 0.0), Send("stream", 1, 0.0)]
    assert load.long_prompts() == [Send("long", i, 15.0 + 8 * i) for i in range(3)]


def test_the_workload_has_eight_long_prompts() -> None:
    assert [send.due_s for send in MixedLoad(MixedSpec()).long_prompts()] == [
        15 + 8 * i for i in range(8)
    ]


def test_a_stream_that_has_ended_is_replaced_by_another_one() -> None:
    load = MixedLoad(SPEC)
    first, second = load.streams()
    assert load.ended(second, True, 9.0) == Send("stream", 2, 9.0)
    assert load.ended(first, True, 9.5) == Send("stream", 3, 9.5)


def test_a_stream_that_failed_is_not_replaced() -> None:
    load = MixedLoad(SPEC)
    first, _ = load.streams()
    assert load.ended(first, False, 9.0) is None


def test_a_long_prompt_is_never_replaced() -> None:
    load = MixedLoad(SPEC)
    assert load.ended(load.long_prompts()[0], True, 16.0) is None


def test_streams_go_on_until_the_last_long_prompt_is_answered() -> None:
    load = MixedLoad(SPEC)
    stream, other = load.streams()
    *answered, last = load.long_prompts()
    for send in answered:
        load.ended(send, True, 34.0)
    next_one = load.ended(stream, True, 40.0)  # the time is over, one answer is missing
    assert next_one is not None
    load.ended(last, False, 41.0)  # a failure is an end too
    assert load.ended(next_one, True, 42.0) is None
    assert load.ended(other, True, 42.0) is None


def test_streams_go_on_until_the_time_is_over() -> None:
    load = MixedLoad(SPEC)
    stream, other = load.streams()
    for send in load.long_prompts():
        load.ended(send, True, 33.0)
    assert load.ended(stream, True, 34.9) is not None
    assert load.ended(other, True, 35.0) is None


def test_a_warm_up_is_one_round() -> None:
    warm_up = warm_up_of(SPEC)
    assert isinstance(warm_up, MixedSpec)
    load = MixedLoad(warm_up)
    assert len(load.streams()) == 2
    assert load.long_prompts() == [Send("long", 0, 0.0)]
