"""Who may join (registry, limits), and who gets work (router, windows)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from coordinator.limits import Limits, limits_of
from coordinator.registry import MAX_DEAD_SHOWN, Registry, Worker
from coordinator.router import Router
from coordinator.tracked import Leg, Load, Tracked
from coordinator.waiting import WaitingLine
from coordinator.windows import has_room_for_both, has_room_to_decode, has_room_to_prefill
from splitserve.config import Liveness, Role
from splitserve.errors import InvalidRequestError
from splitserve.wire import messages as m
from tests.unit.coordinator.scripted_worker import facts
from tests.unit.coordinator.world import FINGERPRINT, World, hello, request, sent


def registry() -> Registry:
    found = Registry(Liveness(), 512, FINGERPRINT.tokenizer)
    found.add(hello("decode", "d0"), b"d0", 0.0)
    found.add(hello("prefill", "p0"), b"p0", 0.0)
    found.fix_limits()
    return found


def changed(change: dict[str, Any], **fields: Any) -> m.Hello:
    good = hello("decode", "new")
    assert good.facts is not None
    fields = {"facts": dataclasses.replace(good.facts, **change), **fields}
    return dataclasses.replace(good, **fields)


# -- registry ------------------------------------------------------------------------------------


def test_a_worker_like_the_others_may_join() -> None:
    assert registry().refusal(hello("decode", "new")) is None


@pytest.mark.parametrize("part", ["weights", "config", "tokenizer"])
def test_another_model_is_refused_naming_both_sides(part: str) -> None:
    """vllm-project/vllm#29503: pools of different models paired happily."""
    other = dataclasses.replace(FINGERPRINT, **{part: "other"})
    reason = registry().refusal(changed({"fingerprint": other}))
    assert reason is not None and "new" in reason and "other" in reason
    assert getattr(FINGERPRINT, part) in reason


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "bfloat16"), ("block_size", 32), ("num_kv_heads", 1)]
)
def test_another_layout_is_refused_naming_both_sides(field: str, value: Any) -> None:
    """vllm-project/vllm#42895: unequal block sizes passed the handshake and failed each request."""
    layout = dataclasses.replace(facts(FINGERPRINT).layout, **{field: value})
    reason = registry().refusal(changed({"layout": layout}))
    assert reason is not None and "new" in reason and "d0" in reason and str(value) in reason


def test_the_first_worker_is_held_to_the_coordinators_own_tokenizer() -> None:
    found = Registry(Liveness(), 512, "another tokenizer")
    reason = found.refusal(hello("decode", "first"))
    assert reason is not None and "another tokenizer" in reason and "first" in reason


def test_the_model_stays_fixed_when_the_first_worker_is_dead() -> None:
    found = registry()
    for worker in list(found.alive()):
        found.bury(worker, "gone")
    other = dataclasses.replace(FINGERPRINT, weights="other")
    assert found.refusal(changed({"fingerprint": other})) is not None


def test_a_hello_without_what_it_needs() -> None:
    assert registry().refusal(changed({}, facts=None)) is not None
    assert registry().refusal(changed({}, endpoints=())) is not None


@pytest.mark.parametrize(
    ("role", "change", "numbers"),
    [
        ("decode", {"num_blocks": 16}, ("256", "512")),
        ("decode", {"max_model_len": 100}, ("100", "512")),
        ("decode", {"max_num_seqs": 2}, ("2", "16")),
        ("prefill", {"num_blocks": 16}, ("256", "511")),
    ],
)
def test_a_smaller_worker_is_refused_naming_both_numbers(
    role: Role, change: dict[str, Any], numbers: tuple[str, str]
) -> None:
    reason = registry().refusal(hello(role, "small", **change))
    assert reason is not None and all(number in reason for number in numbers)


def test_before_the_limits_are_fixed_the_smallest_counts() -> None:
    world = World(0, 0)
    world.state.pools.targets = {"prefill": 1, "decode": 2}
    world.join("decode", "large")
    assert not sent(world.join("decode", "small", num_blocks=10), m.Reject)
    world.join("prefill", "p", max_model_len=100)
    limits = world.state.limits()
    assert (limits.max_prompt_tokens, limits.max_total_tokens) == (100, 160)


def test_only_the_last_dead_are_shown() -> None:
    found = registry()
    for i in range(MAX_DEAD_SHOWN + 3):
        found.bury(found.add(hello("decode", f"x{i}"), b"", 0.0), "gone")
    dead = [w.worker_id for w in found.workers.values() if w.state == "dead"]
    assert dead == [f"x{i}" for i in range(3, MAX_DEAD_SHOWN + 3)]


# -- limits --------------------------------------------------------------------------------------


LIMITS = Limits(
    max_prompt_tokens=100, max_total_tokens=160, max_choices=4, num_decode_blocks=8, block_size=16
)


@pytest.mark.parametrize("num_tokens", [1, 99, 100])
def test_prompts_that_fit(num_tokens: int) -> None:
    assert LIMITS.resolve_max_tokens(num_tokens, None, 16) == 16
    room = 160 - num_tokens
    assert LIMITS.resolve_max_tokens(num_tokens, room, 16) == room
    assert LIMITS.resolve_max_tokens(num_tokens, None, 10**9) == room


@pytest.mark.parametrize(
    ("num_tokens", "asked", "numbers"),
    [(101, None, ("101", "100")), (161, 1, ("161", "100")), (100, 61, ("161", "160"))],
)
def test_requests_that_never_fit_are_told_the_limit(
    num_tokens: int, asked: int | None, numbers: tuple[str, str]
) -> None:
    """vllm-project/vllm#39734: accepted, never scheduled, and no word to anybody."""
    with pytest.raises(InvalidRequestError) as caught:
        LIMITS.resolve_max_tokens(num_tokens, asked, 16)
    assert caught.value.status == 400
    assert all(number in str(caught.value) for number in numbers)


def test_choices_must_fit_side_by_side() -> None:
    LIMITS.check_choices(16, 4)
    with pytest.raises(InvalidRequestError, match="n is 5, the limit for this prompt is 4"):
        LIMITS.check_choices(16, 5)
    LIMITS.check_choices(96, 2)
    with pytest.raises(InvalidRequestError, match="n is 3, the limit for this prompt is 2"):
        LIMITS.check_choices(96, 3)


def test_limits_come_from_the_smallest() -> None:
    small = facts(FINGERPRINT, num_blocks=10, max_num_seqs=3)
    large = facts(FINGERPRINT)
    limits = limits_of([large], [large, small], model_max_len=512)
    assert limits.max_total_tokens == 160 and limits.max_choices == 3
    assert limits_of([large], [large], model_max_len=50).max_total_tokens == 50
    assert limits_of([], [large], model_max_len=512).max_prompt_tokens == 511


# -- router --------------------------------------------------------------------------------------


def workers(role: Role, *names: str) -> list[Worker]:
    found = Registry(Liveness(), 512, FINGERPRINT.tokenizer)
    return [found.add(hello(role, name), name.encode(), 0.0) for name in names]


def test_round_robin_takes_turns_whatever_the_load() -> None:
    router = Router("round_robin")
    pool = workers("decode", "a", "b", "c")
    loads = {"a": Load(num_requests=9, num_choices=9)}
    chosen = [router.choose(pool, loads) for _ in range(6)]
    assert [w.worker_id for w in chosen if w] == ["a", "b", "c", "a", "b", "c"]


def test_least_loaded_takes_the_emptier() -> None:
    router = Router("least_loaded")
    prefill = workers("prefill", "a", "b")
    choice = router.choose(prefill, {"a": Load(num_prompt_tokens=10)})
    assert choice is not None and choice.worker_id == "b"
    decode = workers("decode", "a", "b")
    loads = {"a": Load(num_choices=1, num_decode_blocks=40), "b": Load(num_choices=8)}
    choice = router.choose(decode, loads)
    assert choice is not None and choice.worker_id == "b", "a's blocks are the scarcer"


def test_equal_loads_take_turns() -> None:
    router = Router("least_loaded")
    pool = workers("decode", "a", "b")
    chosen = [w.worker_id for w in (router.choose(pool, {}) for _ in range(4)) if w]
    assert chosen == ["a", "b", "a", "b"]


def test_nobody_to_choose_from() -> None:
    assert Router("least_loaded").choose([], {}) is None


def test_idle_workers_share_requests_that_come_one_by_one() -> None:
    world = World(2, 2)
    pairs = set()
    for i in range(4):
        ((to, prefill),) = sent(world.submit(request(f"r{i}")), m.Prefill)
        world.failed(to, request_id=f"r{i}")
        pairs.add((to, prefill.decode_worker_id))
    assert {p for p, _ in pairs} == {"p0", "p1"} and {d for _, d in pairs} == {"d0", "d1"}


# -- windows -------------------------------------------------------------------------------------

FACTS = facts(FINGERPRINT, num_blocks=20, max_num_seqs=4, max_num_batched_tokens=64)


def leg(request_id: str = "r", **changes: Any) -> Leg:
    """The first leg of a request."""
    (first,) = Tracked.of(request(request_id, **changes), 0, 0.0).legs
    return first


def test_prefill_has_two_steps_outstanding() -> None:
    load = Load(num_requests=1, num_prompt_tokens=100)
    assert has_room_to_prefill(FACTS, load, leg(num_tokens=28))
    assert not has_room_to_prefill(FACTS, load, leg(num_tokens=29))


def test_one_long_prompt_may_always_go_when_none_is_computed() -> None:
    long = leg(num_tokens=500)
    assert has_room_to_prefill(FACTS, Load(), long)
    assert not has_room_to_prefill(FACTS, Load(num_requests=1, num_prompt_tokens=1), long)


def test_short_prompts_need_not_wait_here_for_a_long_one() -> None:
    """sgl-project/sglang#32549: small requests waited tens of seconds behind a huge one."""
    load = Load(num_requests=1, num_prompt_tokens=200, longest_prompt=200)
    assert has_room_to_prefill(FACTS, load, leg(num_tokens=64))
    assert not has_room_to_prefill(FACTS, load, leg(num_tokens=65)), "one step ahead of it, no more"


def test_prefill_never_gets_more_than_its_blocks_hold() -> None:
    """KV that still waits for its decode worker takes blocks too."""
    load = Load(num_requests=3, num_prompt_blocks=18)
    assert has_room_to_prefill(FACTS, load, leg(num_tokens=32))
    assert not has_room_to_prefill(FACTS, load, leg(num_tokens=33))


def test_decode_counts_blocks_and_choices() -> None:
    """sgl-project/sglang #30033: limits did not see KV that had come and did not run yet."""
    load = Load(num_requests=2, num_choices=2, num_decode_blocks=15)
    assert has_room_to_decode(FACTS, load, leg(num_tokens=64, num_choices=1))
    assert not has_room_to_decode(FACTS, load, leg(num_tokens=80, num_choices=1))
    assert has_room_to_decode(FACTS, load, leg(num_tokens=8, num_choices=2))
    assert not has_room_to_decode(FACTS, load, leg(num_tokens=8, num_choices=3))


def test_an_empty_decode_worker_takes_anything_valid() -> None:
    assert has_room_to_decode(FACTS, Load(), leg(num_tokens=600, num_choices=4))


def test_local_prefill_needs_both() -> None:
    busy = Load(num_requests=1, num_choices=1, num_prompt_tokens=120)
    assert not has_room_for_both(FACTS, busy, leg(num_tokens=9))
    assert has_room_for_both(FACTS, busy, leg(num_tokens=8))
    full = Load(num_requests=4, num_choices=4)
    assert not has_room_for_both(FACTS, full, leg(num_tokens=8))


# -- the waiting line ----------------------------------------------------------------------------


def test_the_line_forgets_what_left_it() -> None:
    """Those of low priority are never first, and still must not pile up."""
    line = WaitingLine(max_queue=10)
    line.add(leg("first", priority=-1))
    for i in range(1000):
        line.add(leg(f"x{i}"))
        line.remove(f"x{i}")
    assert len(line) == 1 and len(line._heap) < 200
    first = line.first()
    assert first is not None and first.leg_id == "first"
