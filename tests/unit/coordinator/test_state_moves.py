"""Moves that are nobody's failure: workers that leave, refuse, are full, or were told too late."""

from __future__ import annotations

import pytest

from coordinator.events import Action, Fail, Finish, SendFailed
from coordinator.tracked import MAX_FAILURES
from splitserve.errors import UnavailableError
from splitserve.wire import messages as m
from tests.unit.coordinator.test_state_members import launched
from tests.unit.coordinator.world import (
    EPOCH,
    TIMES,
    World,
    delivered,
    of,
    released,
    request,
    row,
    sent,
)


def to_be_replaced(world: World, *worker_ids: str) -> None:
    for worker_id in worker_ids:
        world.state.registry.workers[worker_id].to_be_replaced = True


def test_a_long_answer_moves_more_often_than_it_may_fail() -> None:
    """A rolling restart of six decode workers ended every long stream with an error."""
    num_moves = MAX_FAILURES + 2
    world = World(1, num_moves + 1, drain_grace_s=5.0)
    actions = world.submit(request(max_tokens=100))
    for index in range(num_moves):
        ((_, prefill),) = sent(actions, m.Prefill)
        decoder, attempt = str(prefill.decode_worker_id), prefill.attempt
        assert attempt == index, "each has its name on the wire"
        world.first_token("p0", row(index, 10 + index, attempt=attempt), attempt=attempt)
        world.hear("p0", m.HandedOver("r", attempt, EPOCH, 1, TIMES))
        world.tokens(decoder, row(index, 10 + index, attempt=attempt))
        world.beat(decoder, draining=True)
        actions = world.wait(2.5) + world.wait(2.5)
        assert not of(actions, Fail)
        assert (decoder, "r", attempt) in released(actions)
    ((_, prefill),) = sent(actions, m.Prefill)
    assert prefill.token_ids[5:] == tuple(range(10, 10 + num_moves))


def test_moves_do_not_make_failures_cheaper() -> None:
    world = World(1, 2, drain_grace_s=1.0)
    ((_, prefill),) = sent(world.submit(request()), m.Prefill)
    world.beat(str(prefill.decode_worker_id), draining=True)
    assert sent(world.wait(1.5), m.Retarget)
    for attempt in range(1, MAX_FAILURES):
        assert sent(world.failed("p0", attempt=attempt, retriable=True), m.Prefill)
    assert of(world.failed("p0", attempt=MAX_FAILURES, retriable=True), Fail)
    assert world.at_rest()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_everybody_may_refuse_once_without_harm(role: str) -> None:
    """Workers that are told to stop one after the other, say."""
    num_refusals = MAX_FAILURES + 1
    many = num_refusals + 1
    world = World(many, 1) if role == "prefill" else World(1, many)
    actions = world.submit(request())
    refusers = set()
    for attempt in range(num_refusals):
        if role == "prefill":
            ((refuser, _),) = sent(actions, m.Prefill)
            actions = world.refused(refuser, attempt=attempt)
        else:
            ids = [said.decode_worker_id for _, said in sent(actions, m.Prefill)]
            ids += [said.decode_worker_id for _, said in sent(actions, m.Retarget)]
            refuser = str(ids[0])
            no = m.Failed("r", attempt, EPOCH, "admission", "why", retriable=True, kept=True)
            actions = world.hear("p0", no)
        refusers.add(refuser)
        assert not of(actions, Fail)
    assert len(refusers) == num_refusals, "nobody is asked twice while another may be asked"


def test_a_worker_that_refuses_again_and_again_ends_the_request() -> None:
    """It is asked once a heartbeat, and only its first refusal is free."""
    world = World()
    world.submit(request())
    for attempt in range(MAX_FAILURES):
        assert not sent(world.refused("p0", attempt=attempt), m.Prefill)
        ((to, again),) = sent(world.beat("p0"), m.Prefill)
        assert (to, again.attempt) == ("p0", attempt + 1)
    (fail,) = of(world.refused("p0", "no room", attempt=MAX_FAILURES), Fail)
    assert "no room" in str(fail.error)
    assert world.at_rest()


def test_a_full_queue_is_tried_again_with_the_next_heartbeat() -> None:
    """All attempts were used up at once, within one event."""
    world = World()
    ((_, prefill),) = sent(world.submit(request()), m.Prefill)
    actions = world.handle(SendFailed(b"p0", prefill, vanished=False))
    assert not of(actions, Fail) and not sent(actions, m.Prefill)
    ((to, again),) = sent(world.beat("p0"), m.Prefill)
    assert (to, again.attempt) == ("p0", 1)
    assert delivered(world.first_token("p0", row(0, 10, attempt=1), attempt=1)) == [10]


def test_a_retarget_that_crossed_the_hand_over_is_not_held_against_the_prefill_worker() -> None:
    world = World(1, 3)
    ((_, prefill),) = sent(world.submit(request(max_tokens=50)), m.Prefill)
    first = str(prefill.decode_worker_id)
    world.first_token("p0")
    actions = world.failed(first, "decode", retriable=True)
    ((_, retarget),) = sent(actions, m.Retarget)
    assert world.handed_over("p0") == [], "too late"
    actions = world.failed("p0", "transfer", attempt=1, retriable=True)
    ((_, again),) = sent(actions, m.Prefill)
    (leg,) = world.state.requests.legs.at(world.state.registry.workers["p0"])
    assert (again.attempt, leg.num_failures, leg.failed_at) == (2, 1, {first})
    assert released(actions) == [(retarget.decode_worker_id, "r", 1)]


def test_a_hand_off_that_fails_without_a_retarget_counts() -> None:
    """The words are the same; here a prefill worker has lost what it was given."""
    world = World(2, 1)
    ((first, _),) = sent(world.submit(request()), m.Prefill)
    ((second, _),) = sent(world.failed(first, "transfer", retriable=True), m.Prefill)
    (leg,) = world.state.requests.legs.at(world.state.registry.workers[second])
    assert second != first and (leg.num_failures, leg.failed_at) == (1, {first})


def stalled(world: World, attempt: int) -> list[Action]:
    no = m.Failed("r", attempt, EPOCH, "transfer", "no progress", retriable=True, kept=True)
    return world.hear("p0", no)


def test_a_decode_worker_in_a_long_step_is_given_more_time_and_no_blame() -> None:
    """Steps just longer than the stall timeout ended every request: no hand-off was answered."""
    world = World()
    ((_, prefill),) = sent(world.submit(request()), m.Prefill)
    assert prefill.stall_timeout_s == 10.0
    for attempt, patience_s in ((0, 20.0), (1, 40.0)):
        world.beat("d0", loop_age_s=patience_s / 4)
        ((_, again),) = sent(stalled(world, attempt), m.Prefill)
        assert again.stall_timeout_s == patience_s
    (leg,) = world.state.requests.legs.at(world.state.registry.workers["d0"])
    assert leg.num_failures == 0
    world.beat("d0", loop_age_s=0.1)
    ((_, again),) = sent(stalled(world, 2), m.Prefill)
    assert again.stall_timeout_s == 40.0, "it turns: something was lost"
    (leg,) = world.state.requests.legs.at(world.state.registry.workers["d0"])
    assert leg.num_failures == 1


def test_patience_with_long_steps_ends() -> None:
    world = World()
    world.submit(request(timeout_s=600.0))
    fails: list[Fail] = []
    for attempt in range(2 * MAX_FAILURES):
        world.beat("d0", loop_age_s=world.state.settings.liveness.max_step_s)
        fails += of(stalled(world, attempt), Fail)
    assert len(fails) == 1 and world.at_rest()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_work_goes_first_to_workers_that_stay(role: str) -> None:
    """In a rolling restart the next victim was chosen again and again."""
    world = World(3, 3, workers={"max_num_seqs": 2})
    name = role[0]
    to_be_replaced(world, f"{name}0", f"{name}1")
    chosen = []
    for i in range(4):
        ((to, prefill),) = sent(world.submit(request(f"r{i}")), m.Prefill)
        chosen.append(to if role == "prefill" else prefill.decode_worker_id)
    if role == "prefill":
        assert chosen == ["p2"] * 4
    else:
        assert chosen[:2] == ["d2", "d2"], "until it has no room"
        assert set(chosen[2:]) == {"d0", "d1"}


def test_where_it_failed_before_is_worse_than_what_leaves_soon() -> None:
    world = World(2, 1)
    to_be_replaced(world, "p1")
    ((first, _),) = sent(world.submit(request()), m.Prefill)
    assert first == "p0"
    ((second, _),) = sent(world.failed("p0", retriable=True), m.Prefill)
    assert second == "p1"


@pytest.mark.parametrize("num_choices", [1, 2])
def test_a_hand_off_that_ends_with_the_first_token_is_released_everywhere(num_choices: int) -> None:
    """The decode worker's blocks hung on one Abort of the prefill worker."""
    world = World()
    world.submit(request(num_choices=num_choices))
    ends = [row(0, 10, finish="stop", choice_id=i) for i in range(num_choices)]
    actions = world.first_token("p0", *ends)
    assert of(actions, Finish)
    assert sorted(released(actions)) == [("d0", "r", 0), ("p0", "r", 0)]
    assert world.at_rest()


def test_an_answer_that_a_decode_worker_ended_needs_no_release_there() -> None:
    world = World()
    world.submit(request(num_choices=2, wants_timing=True))
    assert not of(world.tokens("d0", row(0, 20, 21, choice_id=1, finish="stop")), Finish)
    world.first_token("p0", row(0, 10, finish="stop"), row(0, 20, choice_id=1))
    actions = world.handed_over("p0")
    assert of(actions, Finish) and released(actions) == []


def test_the_only_decode_worker_may_leave_and_requests_wait_for_its_replacement() -> None:
    """ai-dynamo/dynamo PR#9523: SIGTERM cost what was in flight, and what came meanwhile."""
    world = launched(1, 1)
    world.submit(request("a"))
    world.beat("decode-0-x", draining=True)
    world.failed("prefill-0-x", "admission", "a", retriable=True, kept=True)  # decode refused it
    assert not of(world.submit(request("b")), Fail)
    assert not of(world.wait(0.6), Fail)
    world.hear("launcher", m.ProcessExited("decode-0", 7, 0, ""))
    placed = sent(world.join("decode", "d", "decode-1"), m.Prefill)
    assert [(to, prefill.request_id) for to, prefill in placed] == [
        ("prefill-0-x", "a"),
        ("prefill-0-x", "b"),
    ]


def test_without_its_replacement_nobody_waits() -> None:
    world = launched(1, 1)
    world.beat("decode-0-x", draining=True)
    world.submit(request("a"))
    world.wait(0.6)
    actions = world.hear("launcher", m.ProcessExited("decode-1", 7, 1, "no memory"))
    assert [action.request_id for action in of(actions, Fail)] == ["a"]
    with pytest.raises(UnavailableError):
        world.submit(request("b"))
