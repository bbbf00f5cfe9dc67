"""What a request's timeline says, whoever told what of it and in which order."""

from __future__ import annotations

from typing import Any

from coordinator.events import Finish
from splitserve.timeline import Timeline
from splitserve.wire import messages as m
from tests.unit.coordinator.world import EPOCH, TIMES, World, of, request, row

BEGUN = m.Begun("r", 0, 0.25, 0.5)
HANDOFF = ("grant_wait_s", "transfer_s", "decode_wait_s", "first_step_s")


def timeline_of(actions: list[Any]) -> Timeline:
    (finish,) = of(actions, Finish)
    assert isinstance(finish, Finish)
    return finish.timeline


def step(world: World, worker_id: str, *rows: m.TokenRow, begun: m.Begun = BEGUN) -> list[Any]:
    """A decode step that is the first one of a request; its message lay a while."""
    return world.hear(worker_id, m.Tokens(EPOCH, rows, (begun,), unsent_s=0.125))


def handoff(timeline: Timeline) -> list[Any]:
    report = timeline.report()
    return [report[name] for name in HANDOFF]


def test_time_counts_from_when_http_received_the_request() -> None:
    world = World()
    world.submit(request(max_tokens=1, received_at=world.now - 2.0))
    world.now += 1.0
    timeline = timeline_of(world.first_token("p0", row(0, 10, finish="length")))
    assert timeline.ttft_s == 3.0
    assert timeline.queue_s == 2.0 + 0.1, "at HTTP, then at the worker"


def test_parts_of_a_hand_off_come_from_where_they_pass() -> None:
    world = World()
    world.submit(request(max_tokens=2))
    world.first_token("p0")
    world.now += 3.0
    world.handed_over("p0")
    timeline = timeline_of(step(world, "d0", row(0, 10, 11, finish="length")))
    assert handoff(timeline) == [TIMES.grant_wait_s, TIMES.transfer_s, 0.25, 0.5 + 0.125]


def test_what_went_on_before_the_first_token_was_delivered_is_not_in_the_gap() -> None:
    """A busy core tells of the first token late, and of the last byte late."""
    world = World()
    world.submit(request(max_tokens=2))
    world.first_token("p0")
    world.now += 1.0
    world.handed_over("p0")
    timeline = timeline_of(step(world, "d0", row(0, 10, 11, finish="length")))
    wait_s, transfer_s, *others_s = handoff(timeline)
    assert wait_s == TIMES.grant_wait_s and 0 <= transfer_s < TIMES.transfer_s
    assert wait_s + transfer_s + sum(others_s) == 1.0 == timeline.handoff_gap_s


def test_several_choices_have_one_first_step() -> None:
    world = World()
    world.submit(request(num_choices=2, max_tokens=2))
    world.first_token("p0", row(0, 10), row(0, 20, choice_id=1))
    world.handed_over("p0")
    step(world, "d0", row(0, 10, 11, finish="length"))
    late = m.Begun("r", 0, 9.0, 9.0)
    last = row(0, 20, 21, finish="length", choice_id=1)
    timeline = timeline_of(step(world, "d0", last, begun=late))
    assert handoff(timeline)[2:] == [0.25, 0.625]


def test_a_hand_off_that_begins_again_elsewhere_is_one_gap() -> None:
    """The KV is kept: what the prefill worker measures spans both attempts."""
    world = World(1, 2)
    world.submit(request(max_tokens=2))
    world.first_token("p0")
    lost = str(world.state.requests.legs.at(worker(world, "p0"))[0].decode_worker_id)
    other = {"d0": "d1", "d1": "d0"}[lost]
    world.hear("launcher", m.ProcessExited(lost, 7, -9, ""))
    world.hear("p0", m.HandedOver("r", 1, EPOCH, 1000, TIMES))
    rows = row(0, 10, 11, finish="length", attempt=1)
    timeline = timeline_of(step(world, other, rows, begun=m.Begun("r", 1, 0.25, 0.5)))
    assert None not in handoff(timeline)


def test_what_a_lost_attempt_told_is_no_part_of_the_gap() -> None:
    world = World(1, 2)
    world.submit(request(max_tokens=3))
    world.first_token("p0")
    lost = str(world.state.requests.legs.at(worker(world, "p0"))[0].decode_worker_id)
    other = {"d0": "d1", "d1": "d0"}[lost]
    world.handed_over("p0")
    world.now += 1.0
    world.hear("launcher", m.ProcessExited(lost, 7, -9, ""))
    world.now += 1.0
    world.first_token("p0", row(1, 11, attempt=1), attempt=1)
    world.hear("p0", m.HandedOver("r", 1, EPOCH, 1000, TIMES))
    rows = row(1, 11, 12, finish="length", attempt=1)
    timeline = timeline_of(step(world, other, rows, begun=m.Begun("r", 1, 0.25, 0.5)))
    assert handoff(timeline) == [None] * 4
    assert timeline.handoff_gap_s == 2.0


def test_a_prompt_computed_where_it_is_decoded_has_no_hand_off() -> None:
    world = World(0, 1)
    world.submit(request(max_tokens=2))
    world.first_token("d0")
    timeline = timeline_of(world.tokens("d0", row(1, 11, finish="length")))
    assert handoff(timeline) == [None] * 4 and timeline.handoff_gap_s is None


def test_waiting_for_the_timing_is_no_part_of_the_answer() -> None:
    world = World()
    world.submit(request(max_tokens=2, wants_timing=True))
    world.first_token("p0")
    step(world, "d0", row(0, 10, 11, finish="length"))
    world.now += 0.2
    assert timeline_of(world.handed_over("p0")).e2e_s == 0.0


def worker(world: World, worker_id: str) -> Any:
    return world.state.registry.workers[worker_id]
