"""What a prefill worker tells of a hand-off's time, whatever its loop was busy with."""

from __future__ import annotations

import pytest

from prefill_worker.handoff import Finish, Target
from prefill_worker.handoffs import Handoffs
from splitserve.wire import messages as m
from tests.unit.requests import LAYOUT, make_request

PEER = "tcp://d"
REQUEST = make_request("r", 8)
NAMES = ("r", 0, "epoch")
ROW = m.TokenRow("r", 0, 0, 0, (5,))


class Clocked:
    """One hand-off, step by step."""

    def __init__(self) -> None:
        self.handoffs = Handoffs("prefill-0", LAYOUT, 1 << 20)
        self.handoffs.add(REQUEST, Target("decode-0", PEER), now=0.0)
        self.handoffs.open(REQUEST.key, "coordinator", now=0.0)

    def grant(self, at: float, now: float) -> None:
        self.handoffs.handle(PEER, m.Grant(*NAMES, first_missing_token=0), now, at)

    def first_token(self, drawn: float, sent: float) -> None:
        self.handoffs.computed(REQUEST.key, 8)
        self.handoffs.prompt_finished(REQUEST.key, [ROW], drawn)
        told = m.FirstToken(*NAMES, (ROW,), 0.0, 0.0)
        self.handoffs.first_token_sent(told, sent)

    def send_all(self, *at: float) -> None:
        self.handoffs.pump(lambda _: 1 << 30)
        for now in at:
            self.handoffs.sent(REQUEST.key, now)

    def received(self, at: float, waited_s: float = 0.0, unsent_s: float = 0.0) -> m.HandoffTimes:
        message = m.Received(*NAMES, waited_s, unsent_s)
        (finish,) = self.handoffs.handle(PEER, message, at + 5.0, at)  # the loop was busy
        assert isinstance(finish, Finish) and isinstance(finish.report, m.HandedOver)
        assert finish.report.times is not None
        return finish.report.times


def test_a_grant_that_came_during_the_step_was_not_waited_for() -> None:
    one = Clocked()
    one.first_token(drawn=4.0, sent=4.5)
    one.grant(at=2.0, now=4.6)  # the loop takes it behind the step
    one.send_all(5.0, 6.0)
    times = one.received(at=7.0, waited_s=0.5, unsent_s=0.25)
    assert times.grant_wait_s == 0.0
    assert times.transfer_s == 7.0 - 4.5 - 0.75, "from the first token's leaving, not what D waited"
    assert times.kv_transfer_s == 5.0
    assert (times.first_byte_s, times.last_byte_s) == (3.0, 4.0)


def test_a_late_grant_is_waited_for() -> None:
    one = Clocked()
    one.first_token(drawn=1.0, sent=1.25)
    one.grant(at=3.0, now=3.5)
    one.send_all(4.0)
    times = one.received(at=5.0)
    assert (times.grant_wait_s, times.transfer_s, times.kv_transfer_s) == (1.75, 2.0, 2.0)


def test_nothing_is_negative_when_the_decode_worker_counts_more_than_there_was() -> None:
    one = Clocked()
    one.grant(at=1.0, now=1.0)
    one.first_token(drawn=2.0, sent=2.0)
    one.send_all(2.0)
    assert one.received(at=3.0, waited_s=50.0).transfer_s == 0.0


@pytest.mark.parametrize("unfinished", [True, False])
def test_a_prompt_that_ends_at_once_has_no_hand_off(unfinished: bool) -> None:
    one = Clocked()
    actions = one.handoffs.prompt_finished(REQUEST.key, [ROW] if unfinished else [], 1.0)
    reports = [a.report for a in actions if isinstance(a, Finish)]
    assert reports == ([] if unfinished else [m.HandedOver(*NAMES, 0, None)])


@pytest.mark.parametrize("seconds", [-1e18, 1e18])
def test_nonsense_of_the_decode_worker_makes_no_time_longer_than_it_took(seconds: float) -> None:
    """The coordinator takes no such number, nor the message it is in."""
    one = Clocked()
    one.grant(at=1.0, now=1.0)
    one.first_token(drawn=2.0, sent=2.0)
    one.send_all(3.0)
    times = one.received(at=4.0, waited_s=seconds, unsent_s=seconds)
    assert 0.0 <= times.transfer_s <= 2.0
