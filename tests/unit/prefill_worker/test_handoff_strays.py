"""Answers of decode workers about attempts that are over: who waits for more is told so."""

from prefill_worker.handoff import Finish, Send
from splitserve.wire import messages as m
from tests.unit.prefill_worker.test_handoff import NAMES, PEER, TO, opened, plenty, retarget
from tests.unit.requests import make_request


def test_who_waits_for_more_of_a_released_attempt_is_told_so_and_nobody_else() -> None:
    """An Abort that was lost left a decode worker's blocks reserved until its timer ran out."""
    handoffs = opened()
    abort, finish = handoffs.release(make_request("r", 10).key)
    assert isinstance(abort, Send) and isinstance(abort.message, m.Abort)
    assert finish == Finish(make_request("r", 10).key, None)
    assert handoffs.release(make_request("r", 10).key) == []
    missing = (m.Region(0, 3, 2, 5, 0, 2),)
    waits = m.Grant(*NAMES, 0), m.Queued(*NAMES), m.Incomplete(*NAMES, missing=missing)
    for waiting in waits:
        assert handoffs.handle(PEER, waiting, 1.0) == [abort]
    for answer in (m.Received(*NAMES), m.AbortAck(*NAMES), m.Refuse(*NAMES, "full", True)):
        assert handoffs.handle(PEER, answer, 1.0) == [], "it holds nothing, or will go on"
    assert handoffs.pump(plenty) == []


def test_a_grant_of_an_older_attempt_is_answered_with_its_abort() -> None:
    handoffs = opened()
    handoffs.retarget(retarget(1), "coordinator", 1.0)
    grant = m.Grant(*NAMES, first_missing_token=0)
    assert handoffs.handle(PEER, grant, 2.0) == [Send(PEER, m.Abort(*NAMES))]
    assert handoffs.num_in_flight == 0


def test_a_grant_of_what_is_still_to_be_opened_aborts_nothing() -> None:
    """A decode worker takes nothing of an attempt that was aborted."""
    handoffs = opened()
    waiting = make_request("waits", 4).key
    handoffs.add(make_request("waits", 4), TO, now=0.0)
    for attempt in (0, 1):
        grant = m.Grant(waiting.request_id, attempt, "epoch", first_missing_token=0)
        assert handoffs.handle(PEER, grant, 1.0) == []
    assert handoffs.open(waiting, "coordinator", 2.0)


def test_nothing_is_said_to_a_decode_worker_that_is_dead() -> None:
    """It would be a new connection, which nobody would ever close."""
    handoffs = opened()
    handoffs.peer_gone("decode-0")
    assert handoffs.handle(PEER, m.Grant(*NAMES, first_missing_token=0), 1.0) == []
