"""Requests that wait, that nobody can take, and that fall back to local prefill."""

from __future__ import annotations

import pytest

from coordinator.events import (
    Fail,
    Finish,
    RequestCancelled,
    ShutdownRequested,
)
from splitserve.errors import OverloadedError, RequestFailedError, UnavailableError
from splitserve.wire import messages as m
from tests.unit.coordinator.world import World, of, request, row, sent


def test_without_a_prefill_worker_the_decode_worker_computes_the_prompt() -> None:
    world = World(num_prefill=0)
    ((to, prefill),) = sent(world.submit(request(max_tokens=2)), m.Prefill)
    assert to == "d0"
    assert prefill.decode_worker_id is None and prefill.decode_endpoint is None
    assert world.state.dispatcher.num_local_prefills == 1
    world.first_token("d0")
    actions = world.tokens("d0", row(1, 11, finish="length"))
    assert of(actions, Finish) and not sent(actions, m.Release)
    assert world.at_rest()


def test_a_dead_prefill_worker_means_local_prefill_until_one_is_back() -> None:
    world = World()
    world.hear("launcher", m.ProcessExited("p0", 7, -9, ""))
    ((to, _),) = sent(world.submit(request("a")), m.Prefill)
    assert to == "d0"
    world.join("prefill", "p1")
    ((to, _),) = sent(world.submit(request("b")), m.Prefill)
    assert to == "p1"


def test_without_a_decode_worker_there_is_an_answer_at_once() -> None:
    """llm-d/llm-d-router #2628: with nobody to decode, the answer was 429, "saturated"."""
    world = World(workers={"max_num_seqs": 1})
    world.submit(request("served"), request("waiting"))
    actions = world.hear("launcher", m.ProcessExited("d0", 7, -9, ""))
    errors = {fail.request_id: fail.error for fail in of(actions, Fail)}
    assert isinstance(errors["served"], RequestFailedError) and errors["served"].status == 503
    assert isinstance(errors["waiting"], UnavailableError)
    assert world.at_rest()
    with pytest.raises(UnavailableError):
        world.submit(request("late"))


def test_the_queue_has_an_end() -> None:
    """ai-dynamo/dynamo PR#10631: an overloaded pool surfaced as a 500."""
    world = World(max_queue=2, workers={"max_num_seqs": 1})
    world.submit(request("served"))
    world.submit(request("a"), request("b"))
    with pytest.raises(OverloadedError, match="2 requests wait, 2 may"):
        world.submit(request("c"))
    world.handle(RequestCancelled("a"))
    world.submit(request("c"))
    with pytest.raises(OverloadedError):
        world.submit(request("d"), request("e"))
    assert "d" not in world.state.requests.ids, "all or none"


def test_priority_goes_first_then_age() -> None:
    world = World(workers={"max_num_seqs": 1})
    world.submit(request("running"))
    world.submit(request("old"), request("young"), request("urgent", priority=-1))
    order = []
    current = "running"
    for _ in range(3):
        ((_, prefill),) = sent(world.handle(RequestCancelled(current)), m.Prefill)
        current = prefill.request_id
        order.append(current)
    assert order == ["urgent", "old", "young"]


def test_shutting_down_fails_everything_and_takes_nothing() -> None:
    world = World(workers={"max_num_seqs": 1})
    world.submit(request("a"), request("b"))
    actions = world.handle(ShutdownRequested())
    assert {fail.request_id for fail in of(actions, Fail)} == {"a", "b"}
    assert world.at_rest()
    with pytest.raises(UnavailableError, match="shutting down"):
        world.submit(request("c"))
