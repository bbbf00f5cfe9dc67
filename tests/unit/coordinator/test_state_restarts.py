"""Requests that a worker refused or lost, and that go on all the same."""

from __future__ import annotations

import pytest

from coordinator.events import Fail, Finish, SendFailed
from coordinator.tracked import MAX_FAILURES
from splitserve.errors import RequestFailedError
from splitserve.wire import messages as m
from tests.unit.coordinator.test_state_members import states
from tests.unit.coordinator.world import (
    EPOCH,
    World,
    delivered,
    of,
    released,
    request,
    row,
    sent,
)


def killed(world: World, worker_id: str) -> list[object]:
    return list(world.hear("launcher", m.ProcessExited(worker_id, 7, -9, "")))


def other(worker_id: str) -> str:
    return {"p0": "p1", "p1": "p0", "d0": "d1", "d1": "d0"}[worker_id]


def test_a_prefill_worker_that_refuses_is_passed_over() -> None:
    world = World(2, 1)
    ((first, _),) = sent(world.submit(request()), m.Prefill)
    actions = world.refused(first, f"prefill worker {first} is draining")
    assert not of(actions, Fail)
    assert released(actions) == [("d0", "r", 0)]
    ((second, prefill),) = sent(actions, m.Prefill)
    assert second == other(first) and prefill.attempt == 1
    assert delivered(world.first_token(second, row(0, 10, attempt=1), attempt=1)) == [10]


def test_a_worker_that_says_it_drains_gets_no_more() -> None:
    """ai-dynamo/dynamo#13088: requests were routed to workers that were leaving."""
    world = World(2, 2)
    for worker_id in ("p0", "d0"):
        actions = world.beat(worker_id, draining=True)
        assert [to for to, _ in sent(actions, m.Drain)] == [worker_id], "it may leave: it is idle"
        assert states(world)[worker_id] == "draining"
    for i in range(4):
        ((to, prefill),) = sent(world.submit(request(f"r{i}")), m.Prefill)
        assert (to, prefill.decode_worker_id) == ("p1", "d1")


def test_a_draining_worker_leaves_when_nothing_is_left_of_what_it_was_given() -> None:
    world = World(1, 1)
    world.submit(request(max_tokens=2))
    assert not sent(world.beat("p0", draining=True), m.Drain)
    assert not sent(world.first_token("p0"), m.Drain)
    actions = world.handed_over("p0")
    assert [to for to, _ in sent(actions, m.Drain)] == ["p0"]


def test_a_prompt_whose_hand_off_failed_is_pointed_elsewhere() -> None:
    world = World(1, 2)
    ((_, prefill),) = sent(world.submit(request()), m.Prefill)
    first = str(prefill.decode_worker_id)
    actions = world.failed("p0", "admission", retriable=True, kept=True)
    retarget = m.Retarget("r", 1, EPOCH, other(first), f"tcp://{other(first)}:1")
    assert sent(actions, m.Retarget) == [("p0", retarget)]
    assert released(actions) == [(first, "r", 0)]
    assert not sent(actions, m.Prefill) and not of(actions, Fail)


def test_a_first_token_that_a_retarget_has_crossed_counts() -> None:
    world = World(1, 2)
    ((_, prefill),) = sent(world.submit(request(max_tokens=3)), m.Prefill)
    killed(world, str(prefill.decode_worker_id))
    assert delivered(world.first_token("p0")) == [10]
    last = row(0, 10, 11, 12, attempt=1, finish="length")
    actions = world.tokens(other(str(prefill.decode_worker_id)), last)
    assert delivered(actions) == [11, 12] and of(actions, Finish)


def test_without_room_elsewhere_the_prompt_waits_in_the_line() -> None:
    world = World(1, 2, workers={"max_num_seqs": 1})
    world.submit(request("a"))
    ((_, prefill),) = sent(world.submit(request("b")), m.Prefill)
    victim = str(prefill.decode_worker_id)
    actions = world.hear("launcher", m.ProcessExited(victim, 7, -9, ""))
    assert released(actions) == [("p0", "b", 0)] and not sent(actions, m.Retarget)
    assert len(world.state.requests.line) == 1
    world.first_token("p0", row(0, 10, request_id="a"), request_id="a")
    world.handed_over("p0", "a")
    done = row(0, 10, 11, request_id="a", finish="stop")
    ((_, again),) = sent(world.tokens(other(victim), done), m.Prefill)
    assert (again.request_id, again.attempt) == ("b", 1)


@pytest.mark.parametrize("moment", ["prefilling", "transferring"])
def test_a_prompt_outlives_its_prefill_worker(moment: str) -> None:
    """vllm-project/vllm#35943: decode waited for KV that nobody would send."""
    world = World(2, 1)
    ((first, _),) = sent(world.submit(request(max_tokens=3)), m.Prefill)
    if moment == "transferring":
        world.first_token(first)
    actions = world.hear("launcher", m.ProcessExited(first, 7, -9, ""))
    assert ("d0", m.PeerGone(first, EPOCH, True)) in sent(actions, m.PeerGone)
    assert released(actions) == [("d0", "r", 0)]
    ((second, again),) = sent(actions, m.Prefill)
    assert second == other(first) and again.attempt == 1
    assert again.token_ids[5:] == ((10,) if moment == "transferring" else ())


def test_without_a_prefill_worker_the_decode_worker_computes_it() -> None:
    world = World(1, 1)
    world.submit(request())
    actions = world.hear("launcher", m.ProcessExited("p0", 7, -9, ""))
    ((to, again),) = sent(actions, m.Prefill)
    assert to == "d0" and again.decode_worker_id is None and again.attempt == 1


def test_an_answer_outlives_its_decode_worker() -> None:
    """ai-dynamo/dynamo PR#7930: done badly, tokens repeat or vanish."""
    world = World(1, 2)
    ((_, prefill),) = sent(world.submit(request(max_tokens=6)), m.Prefill)
    first = str(prefill.decode_worker_id)
    world.first_token("p0")
    world.handed_over("p0")
    assert delivered(world.tokens(first, row(0, 10, 11, 12))) == [11, 12]
    ((to, again),) = sent(world.hear("launcher", m.ProcessExited(first, 7, -9, "")), m.Prefill)
    assert to == "p0" and again.decode_worker_id == other(first)
    assert again.token_ids == (*prefill.token_ids, 10, 11, 12)
    assert again.num_prompt_tokens == len(prefill.token_ids)
    late = world.tokens(first, row(3, 99, 98))
    assert delivered(late) == [], "the dead say nothing"
    assert delivered(world.first_token("p0", row(3, 13, attempt=1), attempt=1)) == [13]
    last = row(3, 13, 14, 15, attempt=1, finish="length")
    actions = world.tokens(str(again.decode_worker_id), last)
    assert delivered(actions) == [14, 15] and of(actions, Finish)
    assert world.at_rest() or not world.state.requests.ids


def test_choices_that_have_come_apart_go_on_one_by_one() -> None:
    world = World(1, 2)
    ((_, prefill),) = sent(world.submit(request(num_choices=3, max_tokens=4)), m.Prefill)
    first = str(prefill.decode_worker_id)
    world.first_token("p0", *(row(0, 10 + i, choice_id=i) for i in range(3)))
    world.handed_over("p0")
    world.tokens(first, row(0, 10, 20, choice_id=0), row(0, 12, 22, choice_id=2, finish="stop"))
    actions = world.hear("launcher", m.ProcessExited(first, 7, -9, ""))
    going_on = {prefill.request_id: prefill for _, prefill in sent(actions, m.Prefill)}
    assert going_on["r.0"].token_ids[5:] == (10, 20)
    assert going_on["r.1"].token_ids[5:] == (11,)
    assert len(going_on) == 2 and [c.choice_id for c in going_on["r.1"].choices] == [1]
    second = other(first)
    for name, start, tokens in (("r.0", 2, (30, 40)), ("r.1", 1, (21, 31, 41))):
        choice = int(name[-1])
        last = row(start, *tokens, request_id=name, choice_id=choice, attempt=1, finish="length")
        actions = world.tokens(second, last)
        assert delivered(actions, choice) == list(tokens)
    assert of(actions, Finish)


def test_choices_with_no_token_yet_stay_together() -> None:
    world = World(1, 2)
    ((_, prefill),) = sent(world.submit(request(num_choices=2)), m.Prefill)
    world.first_token("p0", row(0, 10))  # of one of them: its prompt is computed for both
    ((_, other_one),) = sent(world.submit(request("s", num_choices=2)), m.Prefill)
    actions = world.hear("launcher", m.ProcessExited("p0", 7, -9, ""))
    names = sorted(p.request_id for _, p in sent(actions, m.Prefill))
    assert names == ["r.0", "r.1", "s"]
    assert prefill.request_id == "r" and len(other_one.choices) == 2


def test_an_answer_longer_than_prefill_workers_take_goes_on_at_a_decode_worker() -> None:
    world = World(1, 2)
    limits = world.state.limits()
    world.submit(request(num_tokens=limits.max_prompt_tokens, max_tokens=8))
    world.first_token("p0")
    world.handed_over("p0")
    first = next(w for w in ("d0", "d1") if world.state.requests.legs.loads().get(w))
    world.tokens(first, row(0, 10, 11))
    ((to, again),) = sent(world.hear("launcher", m.ProcessExited(first, 7, -9, "")), m.Prefill)
    assert to == other(first) and again.decode_worker_id is None


def test_an_order_that_reached_nobody_goes_to_another() -> None:
    world = World(2, 1)
    ((first, prefill),) = sent(world.submit(request()), m.Prefill)
    actions = world.handle(SendFailed(first.encode(), prefill, vanished=True))
    assert not of(actions, Fail)
    ((second, again),) = sent(actions, m.Prefill)
    assert second == other(first) and again.attempt == 1
    assert released(actions) == [("d0", "r", 0)]
    assert states(world)[first] == "dead"


def test_a_restarted_request_goes_before_those_that_wait() -> None:
    world = World(workers={"max_num_seqs": 1})
    world.submit(request("old"), request("waiting"))
    ((_, prefill),) = sent(world.failed("p0", request_id="old", retriable=True), m.Prefill)
    assert (prefill.request_id, prefill.attempt) == ("old", 1)
    assert len(world.state.requests.line) == 1


def test_attempts_have_an_end() -> None:
    world = World()
    world.submit(request())
    for attempt in range(MAX_FAILURES - 1):
        assert sent(world.failed("p0", attempt=attempt, retriable=True), m.Prefill)
    actions = world.failed("p0", attempt=MAX_FAILURES - 1, retriable=True)
    (fail,) = of(actions, Fail)
    assert isinstance(fail.error, RequestFailedError) and fail.error.status == 500
    assert world.at_rest()


def test_whoever_refuses_is_asked_again_when_its_heartbeat_is_here() -> None:
    """Its refusal may come before the beat that says why; all attempts were used up meanwhile."""
    world = World()
    world.submit(request())
    assert not sent(world.refused("p0", "prefill worker p0 is draining"), m.Prefill)
    ((to, again),) = sent(world.beat("p0", draining=True), m.Prefill)
    assert to == "d0" and again.decode_worker_id is None and again.attempt == 1

    world = World()
    world.submit(request())
    assert not sent(world.refused("p0", "epoch is another here"), m.Prefill)
    ((to, _),) = sent(world.beat("p0"), m.Prefill)
    assert to == "p0", "it does not drain after all"


def test_answers_to_an_attempt_that_is_over_change_nothing() -> None:
    world = World()
    world.submit(request())
    world.refused("p0")
    assert world.refused("p0") == []
    actions = world.first_token("p0", row(0, 66))
    assert delivered(actions) == []
    assert released(actions) == [("p0", "r", 0)]


def test_what_is_kept_for_nobody_is_released() -> None:
    """Its report crossed the end of the request."""
    world = World()
    actions = world.failed("p0", "transfer", retriable=True, kept=True)
    assert released(actions) == [("p0", "r", 0)]


def test_the_last_decode_worker_dies_and_there_is_an_answer_at_once() -> None:
    """vllm-project/vllm-ascend#13140: 200 with an empty body."""
    world = World()
    world.submit(request())
    (fail,) = of(world.hear("launcher", m.ProcessExited("d0", 7, -9, "")), Fail)
    assert isinstance(fail.error, RequestFailedError) and fail.error.status == 503
    assert "d0" in str(fail.error) and "no decode worker is left" in str(fail.error)
    assert not world.state.ready and not world.state.requests.ids


def test_a_draining_worker_has_its_time_and_then_its_answers_move() -> None:
    world = World(1, 2, drain_grace_s=5.0)
    ((_, prefill),) = sent(world.submit(request(max_tokens=9)), m.Prefill)
    first = str(prefill.decode_worker_id)
    world.first_token("p0")
    world.handed_over("p0")
    world.tokens(first, row(0, 10, 11))
    assert not sent(world.beat(first, draining=True), m.Drain)
    for _ in range(2):
        assert not sent(world.wait(2.0), m.Prefill)
    actions = world.wait(2.0)
    assert released(actions) == [(first, "r", 0)]
    ((_, again),) = sent(actions, m.Prefill)
    assert again.decode_worker_id == other(first) and again.token_ids[5:] == (10, 11)
    assert [to for to, _ in sent(actions, m.Drain)] == [first]


def test_a_transfer_that_fails_behind_the_hand_off_costs_nothing() -> None:
    """The Received was lost, say: the decode worker streams already."""
    world = World()
    world.submit(request(max_tokens=3))
    world.first_token("p0")
    world.tokens("d0", row(0, 10, 11))
    assert world.failed("p0", "transfer") == []
    actions = world.tokens("d0", row(2, 12, finish="length"))
    assert delivered(actions) == [12]
    assert of(actions, Finish) and not sent(actions, m.Release)
    assert world.at_rest()


def test_an_answer_whose_hand_off_is_not_reported_yet_is_not_retargeted() -> None:
    """What goes on elsewhere goes on from what was delivered, not from the prompt."""
    world = World(1, 2)
    ((_, prefill),) = sent(world.submit(request(max_tokens=9)), m.Prefill)
    first = str(prefill.decode_worker_id)
    world.first_token("p0")
    world.tokens(first, row(0, 10, 11, 12))  # its HandedOver is not here yet
    actions = world.hear("launcher", m.ProcessExited(first, 7, -9, ""))
    assert not sent(actions, m.Retarget) and released(actions) == [("p0", "r", 0)]
    ((_, again),) = sent(actions, m.Prefill)
    assert again.token_ids[5:] == (10, 11, 12)


def test_a_complete_answer_that_waits_for_its_timing_outlives_who_is_stopped() -> None:
    world = World(1, 2, drain_grace_s=0.1)
    world.submit(request(max_tokens=2, wants_timing=True))
    world.first_token("p0")
    world.beat("p0", draining=True)
    decoder = next(w for w in ("d0", "d1") if world.state.requests.legs.loads().get(w))
    assert not of(world.tokens(decoder, row(0, 10, 11, finish="length")), Finish), "it lingers"
    world.now += 0.1
    assert of(world.wait(0.0, beating=False), Finish)
    assert world.at_rest()


def test_who_is_stopped_behind_its_hand_off_costs_nothing() -> None:
    world = World(1, 1, drain_grace_s=0.1)
    world.submit(request(max_tokens=9))
    world.first_token("p0")
    world.tokens("d0", row(0, 10, 11))  # the HandedOver is not here yet
    world.beat("p0", draining=True)
    actions = world.wait(0.2)
    assert released(actions) == [("p0", "r", 0)] and not sent(actions, m.Prefill)
    assert delivered(world.tokens("d0", row(2, 12))) == [12]
