"""Requests that a worker refused or lost, and that go on all the same."""

from __future__ import annotations

import pytest

from coordinator.events import Fail, Finish, SendFailed
from coordinator.tracked import MAX_RESTARTS
from splitserve.errors import RequestFailedError, UnavailableError
from splitserve.wire import messages as m
from tests.unit.coordinator.world import EPOCH, World, delivered, of, request, row, sent


def states(world: World) -> dict[str, str]:
    return {w.worker_id: w.state for w in world.state.registry.workers.values()}


def test_a_draining_prefill_worker_is_passed_over() -> None:
    world = World(2, 1)
    ((first, _),) = sent(world.submit(request()), m.Prefill)
    actions = world.refused(first, f"prefill worker {first} is draining")
    assert not of(actions, Fail)
    assert sent(actions, m.Release) == [("d0", m.Release("r", 0, EPOCH))]
    ((second, prefill),) = sent(actions, m.Prefill)
    assert {first, second} == {"p0", "p1"} and prefill.attempt == 1
    assert states(world)[first] == "draining"
    ((to, _),) = sent(world.submit(request("next")), m.Prefill)
    assert to == second
    assert delivered(world.first_token(second, row(0, 10, attempt=1), attempt=1)) == [10]


def test_a_draining_decode_worker_speaks_through_the_prefill_worker() -> None:
    world = World(1, 2)
    ((_, prefill),) = sent(world.submit(request()), m.Prefill)
    first = str(prefill.decode_worker_id)
    actions = world.refused("p0", f"decode worker {first} is draining")
    ((to, again),) = sent(actions, m.Prefill)
    assert to == "p0" and again.decode_worker_id not in (first, None)
    assert states(world) == {"p0": "ready", first: "draining", again.decode_worker_id: "ready"}


def test_a_restart_goes_behind_what_was_delivered() -> None:
    """The first token often comes before the decode worker's refusal does."""
    world = World(1, 2)
    ((_, prefill),) = sent(world.submit(request(max_tokens=3)), m.Prefill)
    assert delivered(world.first_token("p0")) == [10]
    actions = world.refused("p0", f"decode worker {prefill.decode_worker_id} is draining")
    ((_, again),) = sent(actions, m.Prefill)
    assert again.token_ids == (*prefill.token_ids, 10)
    assert again.num_prompt_tokens == len(prefill.token_ids)
    assert delivered(world.first_token("p0", row(1, 11, attempt=1), attempt=1)) == [11]
    last = row(1, 11, 12, attempt=1, finish="length")
    actions = world.tokens(str(again.decode_worker_id), last)
    assert delivered(actions) == [12]
    assert of(actions, Finish)


def test_an_order_that_reached_nobody_goes_to_another() -> None:
    """A worker that was idle and was told to stop by somebody else is simply gone."""
    world = World(2, 1)
    ((first, prefill),) = sent(world.submit(request()), m.Prefill)
    actions = world.handle(SendFailed(first.encode(), prefill, vanished=True))
    assert not of(actions, Fail)
    ((second, again),) = sent(actions, m.Prefill)
    assert {first, second} == {"p0", "p1"} and again.attempt == 1
    assert sent(actions, m.Release) == [("d0", m.Release("r", 0, EPOCH))]
    assert states(world)[first] == "dead"


@pytest.mark.parametrize("code", [0, -9])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_orders_on_their_way_to_a_worker_that_has_drained(role: str, code: int) -> None:
    """One that exits with code 0 had finished all it took; a crash may have begun them."""
    world = World(2, 2)
    ((prefiller, prefill),) = sent(world.submit(request()), m.Prefill)
    victim = prefiller if role == "prefill" else str(prefill.decode_worker_id)
    actions = world.hear("launcher", m.ProcessExited(victim, 7, code, ""))
    if code == 0:
        ((to, again),) = sent(actions, m.Prefill)
        assert again.attempt == 1 and victim not in (to, again.decode_worker_id)
        assert not of(actions, Fail)
    else:
        assert of(actions, Fail) and world.at_rest()


def test_several_choices_that_have_begun_can_not_restart() -> None:
    world = World(1, 2)
    ((_, prefill),) = sent(world.submit(request(num_choices=2)), m.Prefill)
    world.first_token("p0", row(0, 10), row(0, 20, choice_id=1))
    actions = world.refused("p0", f"decode worker {prefill.decode_worker_id} is draining")
    (fail,) = of(actions, Fail)
    assert isinstance(fail.error, RequestFailedError) and fail.error.status == 503
    assert world.at_rest()


def test_a_restarted_request_goes_before_those_that_wait() -> None:
    world = World(workers={"max_num_seqs": 1})
    world.submit(request("old"), request("waiting"))
    ((_, prefill),) = sent(world.refused("p0", request_id="old"), m.Prefill)
    assert (prefill.request_id, prefill.attempt) == ("old", 1)
    assert len(world.state.requests.line) == 1


def test_restarts_have_an_end() -> None:
    world = World()
    world.submit(request())
    for attempt in range(MAX_RESTARTS):
        assert sent(world.refused("p0", attempt=attempt), m.Prefill)
    actions = world.refused("p0", attempt=MAX_RESTARTS)
    (fail,) = of(actions, Fail)
    assert isinstance(fail.error, RequestFailedError) and fail.error.status == 503
    assert world.at_rest()


def test_answers_to_an_attempt_that_is_over_change_nothing() -> None:
    world = World()
    world.submit(request())
    world.refused("p0")
    assert world.refused("p0") == []
    actions = world.first_token("p0", row(0, 66))
    assert delivered(actions) == []
    assert sent(actions, m.Release) == [("p0", m.Release("r", 0, EPOCH))]


def test_when_all_decode_workers_drain_there_is_an_answer_at_once() -> None:
    world = World()
    world.submit(request())
    (fail,) = of(world.refused("p0", "decode worker d0 is draining"), Fail)
    assert isinstance(fail.error, UnavailableError)
    assert world.at_rest() and not world.state.ready
    with pytest.raises(UnavailableError):
        world.submit(request("late"))


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
