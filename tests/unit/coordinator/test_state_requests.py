"""A request through the state machine: what is sent to whom, delivered, and forgotten."""

from __future__ import annotations

import pytest

from coordinator.events import (
    ChoiceStopped,
    Deliver,
    Fail,
    Finish,
    RequestCancelled,
    Send,
    SendFailed,
)
from coordinator.requests import TIMING_WAIT_S
from splitserve.errors import RequestFailedError
from splitserve.request import SampledToken
from splitserve.wire import messages as m
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


def error_of(actions: list[object]) -> RequestFailedError:
    (fail,) = [action for action in actions if isinstance(action, Fail)]
    assert isinstance(fail.error, RequestFailedError)
    return fail.error


def release(worker_id: str, request_id: str = "r") -> Send:
    return Send(worker_id.encode(), m.Release(request_id, 0, EPOCH, 60.0))


def test_a_request_is_sent_once_and_to_the_prefill_worker_only() -> None:
    world = World()
    asked = request(timeout_s=60.0)
    assert world.submit(asked) == [
        Send(
            b"p0",
            m.Prefill(
                "r",
                0,
                EPOCH,
                asked.token_ids,
                5,
                asked.choices,
                asked.sampling,
                deadline_s=60.0,
                stall_timeout_s=10.0,
                decode_worker_id="d0",
                decode_endpoint="tcp://d0:1",
            ),
        )
    ]


def test_the_whole_life_of_a_request() -> None:
    world = World()
    world.submit(request(max_tokens=3))
    world.now += 1
    assert delivered(world.first_token("p0")) == [10]
    assert world.handed_over("p0") == []
    world.now += 1
    # The decode worker's first row repeats the token that came with Commit.
    assert delivered(world.tokens("d0", row(0, 10, 11))) == [11]
    actions = world.tokens("d0", row(2, 12, finish="length"))
    assert actions[0] == Deliver("r", 0, (SampledToken(12),), "length")
    (finish,) = of(actions, Finish)
    assert actions == [actions[0], finish], "nobody holds it: nobody is told"
    assert finish.timeline.ttft_s == 1 and finish.timeline.handoff_gap_s == 1
    assert finish.timeline.report()["prefill_worker_id"] == "p0"
    assert finish.timeline.report()["transfer_s"] == TIMES.transfer_s
    assert world.at_rest()


def test_a_decode_row_that_overtakes_the_first_token() -> None:
    world = World()
    world.submit(request())
    assert delivered(world.tokens("d0", row(0, 10, 11))) == [10, 11]
    assert delivered(world.first_token("p0")) == []


def test_tokens_are_held_until_the_gap_before_them_is_filled() -> None:
    world = World()
    world.submit(request(max_tokens=4))
    assert delivered(world.tokens("d0", row(1, 11, 12))) == []
    assert delivered(world.tokens("d0", row(3, 13, finish="length"))) == []
    actions = world.first_token("p0")
    assert delivered(actions) == [10, 11, 12, 13]
    assert of(actions, Finish)


def test_a_request_for_one_token_ends_at_the_first() -> None:
    """sgl-project/sglang#7147: it used to be two."""
    world = World()
    world.submit(request(max_tokens=1))
    actions = world.first_token("p0", row(0, 10, finish="length"))
    assert delivered(actions) == [10]
    assert of(actions, Finish)
    assert sorted(released(actions)) == [("d0", "r", 0), ("p0", "r", 0)]
    assert world.at_rest()
    assert world.handed_over("p0") == [], "the answer to that Release"


def test_n_choices_end_one_by_one() -> None:
    world = World()
    world.submit(request(num_choices=2, max_tokens=8))
    world.first_token("p0", row(0, 10, finish="stop"), row(0, 20, choice_id=1))
    world.handed_over("p0")
    actions = world.tokens("d0", row(0, 20, 21, choice_id=1, finish="stop"))
    assert delivered(actions, choice_id=1) == [21]
    assert of(actions, Finish)


def test_rows_of_other_attempts_are_not_delivered_and_are_released() -> None:
    world = World()
    world.submit(request())
    actions = world.tokens("d0", row(0, 99, attempt=1))
    assert delivered(actions) == []
    assert released(actions) == [("d0", "r", 1)]
    actions = world.first_token("p0", attempt=7)
    assert released(actions) == [("p0", "r", 7)]


def test_rows_of_unknown_requests_are_released_once_a_message() -> None:
    world = World()
    actions = world.tokens("d0", row(0, 1), row(0, 1, choice_id=1), row(4, 2, request_id="x"))
    assert [message.request_id for _, message in sent(actions, m.Release)] == ["r", "x"]
    assert world.state.requests.num_wasted_tokens == 3


def test_rows_from_a_worker_that_was_not_given_the_request_are_refused() -> None:
    world = World(num_decode=2)
    ((_, prefill),) = sent(world.submit(request()), m.Prefill)
    other = {"d0": "d1", "d1": "d0"}[str(prefill.decode_worker_id)]
    actions = world.tokens(other, row(0, 66))
    assert delivered(actions) == []
    assert released(actions) == [(other, "r", 0)]


def test_messages_of_another_epoch_or_of_strangers_are_dropped() -> None:
    world = World()
    world.submit(request())
    assert world.hear("p0", m.FirstToken("r", 0, "before", (row(0, 10),), 0, 0)) == []
    assert world.hear("stranger", m.Tokens(EPOCH, (row(0, 10),))) == []
    assert delivered(world.first_token("p0")) == [10]


@pytest.mark.parametrize("moment", ["prefilling", "transferring", "decoding"])
def test_a_hang_up_releases_whoever_has_the_request(moment: str) -> None:
    world = World()
    world.submit(request())
    if moment != "prefilling":
        world.first_token("p0")
    if moment == "decoding":
        world.handed_over("p0")
        world.tokens("d0", row(0, 10, 11))
    actions = world.handle(RequestCancelled("r"))
    holders = ["d0"] if moment == "decoding" else ["d0", "p0"]
    assert sorted(to for to, _ in sent(actions, m.Release)) == holders
    assert not of(actions, Finish) and not of(actions, Fail), "nobody is there to hear it"
    assert world.at_rest()
    assert world.failed("p0") == [], "a late answer is ignored"


def test_a_hang_up_while_waiting_is_never_sent_anywhere() -> None:
    world = World(workers={"max_num_seqs": 1})
    world.submit(request("first"), request("second"), request("third"))
    assert world.handle(RequestCancelled("second")) == []
    actions = world.handle(RequestCancelled("first"))
    assert [message.request_id for _, message in sent(actions, m.Prefill)] == ["third"]


def test_a_stop_string_ends_the_request_at_the_workers() -> None:
    world = World()
    world.submit(request(num_choices=2))
    world.first_token("p0", row(0, 10), row(0, 20, choice_id=1))
    world.handed_over("p0")
    assert world.handle(ChoiceStopped("r", 0)) == [], "the other choice goes on"
    actions = world.tokens("d0", row(0, 10, 11), row(0, 20, 21, choice_id=1))
    assert delivered(actions) == [] and delivered(actions, 1) == [21]
    assert world.state.requests.num_wasted_tokens == 1
    actions = world.handle(ChoiceStopped("r", 1))
    assert of(actions, Finish)
    assert released(actions) == [("d0", "r", 0)]
    assert world.at_rest()


@pytest.mark.parametrize(
    ("stage", "status"),
    [("prefill", 500), ("transfer", 500), ("admission", 503), ("deadline", 504), ("decode", 500)],
)
def test_a_failure_at_a_worker_ends_the_request(stage: m.Stage, status: int) -> None:
    world = World()
    world.submit(request())
    actions = world.failed("p0", stage)
    error = error_of(list(actions))
    assert (error.stage, error.status) == (stage, status)
    assert "p0" in str(error) and "why" in str(error)
    assert released(actions) == [("d0", "r", 0)]
    assert world.at_rest()


def test_the_deadline_ends_a_request_wherever_it_is() -> None:
    world = World(workers={"max_num_seqs": 1})
    world.submit(request("served", timeout_s=5.0), request("waiting", timeout_s=6.0))
    assert world.state.due() == 103.0, "heartbeats are due before"
    assert not of(world.wait(2.5), Fail)
    assert not of(world.wait(2.4), Fail)
    actions = world.wait(0.1)
    error = error_of(list(actions))
    assert error.status == 504 and error.stage == "deadline" and "5 s" in str(error)
    assert sorted(to for to, _ in sent(actions, m.Release)) == ["d0", "p0"]
    ((_, prefill),) = sent(actions, m.Prefill)
    assert prefill.request_id == "waiting"
    assert prefill.deadline_s == pytest.approx(1.0), "what is left of it"


def test_a_prefill_that_can_not_be_sent_goes_elsewhere() -> None:
    world = World(2, 1)
    ((first, prefill),) = sent(world.submit(request()), m.Prefill)
    actions = world.handle(SendFailed(first.encode(), prefill, vanished=False))
    ((second, again),) = sent(actions, m.Prefill)
    assert {first, second} == {"p0", "p1"} and again.attempt == 1


def test_timing_waits_a_moment_for_the_report_on_the_transfer() -> None:
    world = World()
    world.submit(request(max_tokens=2, wants_timing=True))
    world.first_token("p0")
    assert not of(world.tokens("d0", row(0, 10, 11, finish="length")), Finish)
    (finish,) = of(world.handed_over("p0"), Finish)
    assert finish.timeline.handoff == TIMES
    assert world.at_rest()


@pytest.mark.parametrize("how", ["death", "failure"])
def test_a_complete_answer_outlives_what_happens_behind_it(how: str) -> None:
    """It waits for its timing only."""
    world = World()
    world.submit(request(max_tokens=2, wants_timing=True))
    world.first_token("p0")
    world.tokens("d0", row(0, 10, 11, finish="length"))
    if how == "death":
        actions = world.hear("launcher", m.ProcessExited("p0", 7, -9, ""))
    else:
        actions = world.failed("p0", "transfer")
    assert of(actions, Finish) and not of(actions, Fail)
    assert world.at_rest()


def test_timing_does_not_wait_for_long() -> None:
    world = World()
    world.submit(request(max_tokens=2, wants_timing=True))
    world.first_token("p0")
    world.tokens("d0", row(0, 10, 11, finish="length"))
    assert not of(world.wait(TIMING_WAIT_S - 0.1), Finish)
    assert of(world.wait(0.2), Finish)
    assert world.at_rest()


@pytest.mark.parametrize(("told", "taken"), [(0, 0), (3, 3), (99, 5), (-1, 0)])
def test_cached_tokens_are_those_of_the_prompt(told: int, taken: int) -> None:
    world = World()
    world.submit(request(max_tokens=1))
    actions = world.first_token("p0", row(0, 10, finish="length"), num_cached=told)
    (finish,) = of(actions, Finish)
    assert finish.num_cached_tokens == taken


def test_what_a_later_attempt_finds_cached_does_not_count() -> None:
    """vllm-project/vllm#25780: tokens computed twice counted as cached."""
    world = World()
    world.submit(request(max_tokens=2))
    world.first_token("p0", num_cached=1)
    world.failed("d0", "decode", retriable=True)
    actions = world.first_token("p0", row(1, 11, finish="length"), attempt=1, num_cached=4)
    (finish,) = of(actions, Finish)
    assert finish.num_cached_tokens == 1
