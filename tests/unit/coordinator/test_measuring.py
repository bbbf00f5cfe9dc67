"""What is counted of a request, and when: once, and also when a worker's word comes late."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from coordinator.events import Finish
from coordinator.measuring import LATE_S, Measuring
from coordinator.profiles import Profiles
from coordinator.tickets import Call, Ticket
from splitserve.cluster_metrics import ClusterSample
from splitserve.metrics import Metrics
from splitserve.timeline import Timeline
from splitserve.wire import messages as m
from tests.unit.coordinator.world import TIMES, request
from tests.unit.test_metrics import own

HANDOFF = [f"handoff_{stage}_seconds_count" for stage in ("gap", "grant_wait", "transfer")]
WHOLE = ["time_to_first_token_seconds_count", "e2e_request_latency_seconds_count"]


class Measured:
    """Requests that have all their tokens."""

    def __init__(self) -> None:
        self.metrics = Metrics("model", lambda: ClusterSample((), 0, 0, 0, 0, 0))
        self.measuring = Measuring(self.metrics, Profiles(lambda: 0.0))

    def finish(self, request_id: str, times: m.HandoffTimes | None = None) -> Call:
        """Two tokens each; `times` when the prefill worker has told of its hand-off by then."""
        self.measuring.accepted([request(request_id)])
        timeline = Timeline(arrived_at=0.0)
        timeline.dispatched("p", "d", 0, now=1.0)
        timeline.prompt_computed(0, 0.5, 1.0)
        timeline.tokens_delivered(0, now=3.0)
        if times is not None:
            timeline.handed_over(0, 1000, times)
        timeline.decode_began(0, m.Begun(request_id, 0, 0.25, 0.25))
        timeline.tokens_delivered(1, now=5.0)
        timeline.finished(5.0)
        news: asyncio.Queue[Any] = asyncio.Queue()
        ticket = Ticket(request_id, 0, {}, news)
        ticket.end(Finish(request_id, timeline))
        self.measuring.ended(ticket)
        return Call((ticket,), news)

    def counts(self, names: list[str]) -> list[float]:
        return [own(self.metrics, name) for name in names]


def test_an_answer_is_timed_once_however_often_it_is_given_back() -> None:
    one = Measured()
    call = one.finish("r", TIMES)
    assert one.counts(HANDOFF) == [1, 1, 1] and one.counts(WHOLE) == [0, 0]
    one.measuring.answered(call)
    one.measuring.answered(call)
    assert one.counts([*HANDOFF, *WHOLE]) == [1] * 5


def test_a_hand_off_that_is_told_of_late_is_counted_then() -> None:
    one = Measured()
    one.measuring.answered(one.finish("r"))
    assert one.counts(HANDOFF) == [0, 0, 0] and one.counts(WHOLE) == [1, 1]
    for _ in range(2):
        one.measuring.heard(m.HandedOver("r", 0, "epoch", 1000, TIMES))
    assert one.counts(HANDOFF) == [1, 1, 1]


def test_one_that_is_never_told_of_is_not_kept_for_ever() -> None:
    one = Measured()
    one.finish("r")
    one.measuring.turned(time.monotonic())
    assert one.counts(HANDOFF) == [0, 0, 0]
    one.measuring.turned(time.monotonic() + LATE_S)
    assert one.counts(HANDOFF) == [1, 0, 0], "the gap is known, its parts are not"


def test_another_attempt_says_nothing_of_this_one() -> None:
    one = Measured()
    one.finish("r")
    one.measuring.heard(m.HandedOver("r", 7, "epoch", 1000, TIMES))
    assert one.counts(HANDOFF) == [0, 0, 0]


def test_the_log_has_a_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    one = Measured()
    with caplog.at_level(logging.DEBUG, "coordinator.measuring"):
        one.measuring.answered(one.finish("r", TIMES))
    (line,) = caplog.messages
    assert line.startswith(
        "r by p > d, ms: received 0.0, dispatched 1000.0, prefill_started 1500.0"
    )
    assert line.endswith("second_token_delivered 5000.0, finished 5000.0")
