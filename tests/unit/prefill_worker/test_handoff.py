import pytest

from kv_transfer.chunks import region_bytes
from prefill_worker.handoff import (
    COMPUTING_EVERY_S,
    Action,
    Disconnect,
    Finish,
    Rekey,
    Report,
    Send,
    SendFrame,
    Target,
)
from prefill_worker.handoffs import Handoffs
from splitserve.wire import messages as m
from tests.unit.requests import LAYOUT, make_request

TO = Target("decode-0", "tcp://d")
NAMES = ("r", 0, "epoch")
PEER = TO.endpoint


def plenty(_peer: str) -> int:
    return 1 << 30


def opened(num_tokens: int = 10, max_frame_bytes: int = 1 << 20, n: int = 1) -> Handoffs:
    handoffs = Handoffs("prefill-0", LAYOUT, max_frame_bytes)
    request = make_request("r", num_tokens, n=n)
    handoffs.add(request, TO, now=0.0)
    (opening,) = handoffs.open(request.key, "coordinator", now=0.0)
    assert isinstance(opening, Send) and isinstance(opening.message, m.Open)
    assert opening.message.to_worker_id == "decode-0"
    return handoffs


def row(choice_id: int = 0) -> m.TokenRow:
    return m.TokenRow("r", 0, choice_id, 0, (5,))


def tokens_of(actions: list[Action]) -> list[tuple[int, int]]:
    regions = [a.region for a in actions if isinstance(a, SendFrame)]
    return [(r.token_start, r.token_end) for r in regions]


def test_frames_follow_the_grant_chunk_by_chunk_and_commit_comes_last() -> None:
    handoffs = opened()
    handoffs.computed(make_request("r", 10).key, 4)
    assert handoffs.pump(plenty) == []  # no Grant yet
    handoffs.handle(PEER, m.Grant(*NAMES, first_missing_token=0), 1.0)
    assert tokens_of(handoffs.pump(plenty)) == [(0, 4)]
    handoffs.computed(make_request("r", 10).key, 10)
    (said,) = handoffs.prompt_finished(make_request("r", 10).key, [row()], 2.0)
    assert said == Send(PEER, m.Computed(*NAMES))  # ahead of the last frames
    actions = handoffs.pump(plenty)
    assert tokens_of(actions) == [(4, 10)]
    assert isinstance(actions[-1], Send) and isinstance(actions[-1].message, m.Commit)
    assert actions[-1].message.num_kv_bytes == 10 * LAYOUT.token_bytes
    (finish,) = handoffs.handle(PEER, m.Received(*NAMES), 3.0)
    assert isinstance(finish, Finish) and isinstance(finish.report, m.HandedOver)
    assert finish.report.times == m.HandoffTimes(0.0, 1.0, 2.0, 0.0, 0.0)
    assert handoffs.due() is None


def test_frames_wait_for_room_and_never_overtake_commit() -> None:
    room = LAYOUT.token_bytes
    handoffs = opened(num_tokens=4, max_frame_bytes=room)
    handoffs.handle(PEER, m.Grant(*NAMES, first_missing_token=0), 1.0)
    handoffs.computed(make_request("r", 4).key, 4)
    handoffs.prompt_finished(make_request("r", 4).key, [row()], 1.0)
    sent: list[Action] = []
    while not sent or not isinstance(sent[-1], Send):
        actions = handoffs.pump(lambda _: room)
        frames = [a.region for a in actions if isinstance(a, SendFrame)]
        assert 0 < sum(region_bytes(LAYOUT, region) for region in frames) <= room
        sent += actions
    total = sum(region_bytes(LAYOUT, a.region) for a in sent if isinstance(a, SendFrame))
    assert total == 4 * LAYOUT.token_bytes
    assert handoffs.pump(lambda _: room) == []


def test_finished_at_the_first_token_is_an_abort_in_place_of_a_commit() -> None:
    handoffs = opened()
    abort, finish = handoffs.prompt_finished(make_request("r", 10).key, [], 1.0)
    assert isinstance(abort, Send) and isinstance(abort.message, m.Abort)
    assert isinstance(finish, Finish) and isinstance(finish.report, m.HandedOver)
    assert finish.report.num_kv_bytes == 0


def test_nothing_opened_is_nothing_aborted() -> None:
    handoffs = Handoffs("prefill-0", LAYOUT, 1 << 20)
    request = make_request("r", 10, max_tokens=1)
    handoffs.add(request, TO, now=0.0)
    assert handoffs.open(request.key, "coordinator", now=0.0) == []
    (finish,) = handoffs.prompt_finished(make_request("r", 10).key, [], 1.0)
    assert isinstance(finish, Finish) and isinstance(finish.report, m.HandedOver)


def test_missing_regions_are_sent_once_more_then_the_transfer_fails() -> None:
    handoffs = opened()
    handoffs.handle(PEER, m.Grant(*NAMES, first_missing_token=0), 1.0)
    handoffs.computed(make_request("r", 10).key, 10)
    handoffs.prompt_finished(make_request("r", 10).key, [row()], 1.0)
    handoffs.pump(plenty)
    missing = (m.Region(0, 3, 2, 5, 0, 2),)
    handoffs.handle(PEER, m.Incomplete(*NAMES, missing=missing), 2.0)
    again = handoffs.pump(plenty)
    assert tokens_of(again) == [(2, 5)]
    assert isinstance(again[-1], Send) and isinstance(again[-1].message, m.Commit)
    abort, report = handoffs.handle(PEER, m.Incomplete(*NAMES, missing=missing), 3.0)
    assert isinstance(abort, Send) and isinstance(abort.message, m.Abort)
    assert isinstance(report, Report)
    assert (report.message.stage, report.message.kept) == ("transfer", True)


def test_a_refusal_that_another_worker_may_not_share_keeps_the_prompt() -> None:
    (report,) = opened().handle(PEER, m.Refuse(*NAMES, reason="full", retriable=True), 1.0)
    assert isinstance(report, Report)
    failed = report.message
    assert (failed.reason, failed.retriable, failed.kept) == ("full", True, True)


def test_a_refusal_that_all_would_share_ends_the_request() -> None:
    handoffs = opened()
    (finish,) = handoffs.handle(PEER, m.Refuse(*NAMES, reason="too long", retriable=False), 1.0)
    assert isinstance(finish, Finish) and isinstance(finish.report, m.Failed)
    assert (finish.report.retriable, finish.report.kept) == (False, False)
    assert not handoffs


def test_the_stall_timer_runs_while_unanswered_and_not_while_queued() -> None:
    """Who is queued asks again now and then: a Grant may have been lost with a connection."""
    handoffs = opened()
    assert handoffs.due() == 10.0
    handoffs.handle(PEER, m.Queued(*NAMES), 5.0)
    assert handoffs.due() == 15.0
    (again,) = handoffs.expire(15.0)
    assert isinstance(again, Send) and isinstance(again.message, m.Open)
    assert (again.message.attempt, again.message.deadline_s) == (0, 585.0)
    assert handoffs.due() == 25.0
    handoffs.handle(PEER, m.Grant(*NAMES, first_missing_token=0), 100.0)
    handoffs.computed(make_request("r", 10).key, 10)
    handoffs.prompt_finished(make_request("r", 10).key, [row()], 101.0)
    assert handoffs.due() == 111.0
    assert handoffs.expire(110.9) == []
    abort, report, disconnect = handoffs.expire(111.0)
    assert isinstance(abort, Send) and isinstance(abort.message, m.Abort)
    assert isinstance(report, Report) and report.message.kept
    assert disconnect == Disconnect(TO.endpoint)
    assert handoffs.due() == 600.0


def test_the_deadline_ends_even_a_queued_hand_off() -> None:
    handoffs = opened()
    handoffs.handle(PEER, m.Queued(*NAMES), 5.0)
    _, finish = handoffs.expire(600.0)
    assert isinstance(finish, Finish) and isinstance(finish.report, m.Failed)
    assert finish.report.stage == "deadline"


def retarget(attempt: int, worker_id: str = "decode-1") -> m.Retarget:
    return m.Retarget("r", attempt, "epoch", worker_id, f"tcp://{worker_id}")


def finished(handoffs: Handoffs) -> None:
    handoffs.computed(make_request("r", 10).key, 10)
    handoffs.prompt_finished(make_request("r", 10).key, [row()], 2.0)


@pytest.mark.parametrize("room_bytes", [0, 1 << 30])
@pytest.mark.parametrize("num_computed", [0, 4, 10])
def test_a_retargeted_prompt_sends_all_its_kv_anew_and_its_first_tokens(
    num_computed: int, room_bytes: int
) -> None:
    handoffs = opened()
    handoffs.handle(PEER, m.Grant(*NAMES, first_missing_token=0), 1.0)
    handoffs.computed(make_request("r", 10).key, num_computed)
    if num_computed == 10:
        finished(handoffs)
    handoffs.pump(lambda _: room_bytes)
    abort, rekey, opening = handoffs.retarget(retarget(1), "coordinator", 3.0)
    assert abort == Send(TO.endpoint, m.Abort("r", 0, "epoch"))
    assert isinstance(rekey, Rekey) and rekey.request.key == ("r", 1)
    assert isinstance(opening, Send) and opening.peer == "tcp://decode-1"
    assert isinstance(opening.message, m.Open) and opening.message.attempt == 1
    assert handoffs.handle(PEER, m.Received(*NAMES), 3.0) == []  # of the old attempt
    handoffs.handle(PEER, m.Grant("r", 1, "epoch", first_missing_token=0), 4.0)
    key = rekey.request.key
    handoffs.computed(key, 10)
    if num_computed < 10:
        handoffs.prompt_finished(key, [m.TokenRow("r", 1, 0, 0, (5,))], 4.0)
    actions = handoffs.pump(plenty)
    assert tokens_of(actions) == [(0, 10)]
    commit = actions[-1]
    assert isinstance(commit, Send) and isinstance(commit.message, m.Commit)
    assert commit.message.first_tokens == (m.TokenRow("r", 1, 0, 0, (5,)),)
    (finish,) = handoffs.handle(PEER, m.Received("r", 1, "epoch"), 5.0)
    assert isinstance(finish, Finish) and isinstance(finish.report, m.HandedOver)
    assert finish.report.attempt == 1


def test_a_prompt_that_waits_for_blocks_only_changes_its_target() -> None:
    handoffs = Handoffs("prefill-0", LAYOUT, 1 << 20)
    handoffs.add(make_request("r", 10), TO, now=0.0)
    (rekey,) = handoffs.retarget(retarget(2), "coordinator", 1.0)
    assert isinstance(rekey, Rekey)
    (opening,) = handoffs.open(rekey.request.key, "coordinator", 2.0)
    assert isinstance(opening, Send) and isinstance(opening.message, m.Open)
    assert (opening.peer, opening.message.to_worker_id) == ("tcp://decode-1", "decode-1")


def test_a_refused_hand_off_is_retargeted_without_an_abort() -> None:
    handoffs = opened()
    handoffs.handle(PEER, m.Refuse(*NAMES, reason="draining", retriable=True), 1.0)
    rekey, opening = handoffs.retarget(retarget(1), "coordinator", 2.0)
    assert isinstance(rekey, Rekey)
    assert isinstance(opening, Send) and isinstance(opening.message, m.Open)


def test_a_retarget_of_what_is_not_here_fails_the_new_attempt() -> None:
    (report,) = Handoffs("prefill-0", LAYOUT, 1).retarget(retarget(4), "coordinator", 1.0)
    assert isinstance(report, Report)
    failed = report.message
    assert (failed.attempt, failed.stage, failed.retriable, failed.kept) == (
        4,
        "transfer",
        True,
        False,
    )
    assert opened().retarget(retarget(0), "coordinator", 1.0) == []  # not a newer attempt


def test_a_release_takes_older_attempts_along_and_no_newer_one() -> None:
    handoffs = opened()
    handoffs.retarget(retarget(2), "coordinator", 1.0)
    key = make_request("r", 10).key
    assert handoffs.release(key) == []
    assert handoffs.release(key._replace(attempt=1)) == []
    abort, finish = handoffs.release(key._replace(attempt=5))
    assert abort == Send("tcp://decode-1", m.Abort("r", 2, "epoch"))
    assert finish == Finish(key._replace(attempt=2), None)


def test_a_dead_decode_worker_leaves_the_prompt_without_a_report() -> None:
    handoffs = opened()
    handoffs.handle(PEER, m.Grant(*NAMES, first_missing_token=0), 1.0)
    handoffs.add(make_request("waits", 4), TO, now=0.0)
    assert handoffs.peer_gone("decode-0") == [Disconnect(TO.endpoint)]
    finished(handoffs)
    assert handoffs.pump(plenty) == []
    assert handoffs.handle(PEER, m.AbortAck(*NAMES), 2.0) == []
    assert handoffs.open(make_request("waits", 4).key, "coordinator", 2.0) == []
    assert (handoffs.due(), handoffs.num_in_flight) == (600.0, 0)
    rekey, opening = handoffs.retarget(retarget(1), "coordinator", 3.0)
    assert isinstance(rekey, Rekey) and isinstance(opening, Send)


def test_an_unplaced_prompt_ends_at_its_deadline() -> None:
    handoffs = opened()
    handoffs.peer_gone("decode-0")
    (finish,) = handoffs.expire(600.0)
    assert isinstance(finish, Finish) and isinstance(finish.report, m.Failed)
    assert (finish.report.stage, finish.report.kept) == ("deadline", False)


def test_an_abort_ack_unplaces_and_is_not_answered() -> None:
    (report,) = opened().handle(PEER, m.AbortAck(*NAMES), 1.0)
    assert isinstance(report, Report) and report.message.kept


def test_the_peer_of_a_granted_prompt_hears_that_it_is_being_computed() -> None:
    handoffs = opened()
    assert handoffs.before_step(0.5) == []  # not granted
    handoffs.handle(PEER, m.Grant(*NAMES, first_missing_token=0), 1.0)
    computing = Send(TO.endpoint, m.Computing(*NAMES))
    assert handoffs.before_step(1.0) == [computing]
    assert handoffs.before_step(1.1) == []
    assert handoffs.before_step(1.0 + COMPUTING_EVERY_S) == [computing]
    handoffs.computed(make_request("r", 10).key, 4)
    handoffs.pump(plenty)
    handoffs.sent(make_request("r", 10).key, 6.1)
    assert handoffs.before_step(6.2) == [computing]  # the frame started the peer's stall timer
    handoffs.computed(make_request("r", 10).key, 10)
    finished(handoffs)
    handoffs.pump(plenty)  # frames, and the Commit
    assert handoffs.before_step(20.0) == []


@pytest.mark.parametrize(
    "missing",
    [
        (),
        (m.Region(0, 2**62, 0, 2**62, 0, 2**62),),
        (m.Region(0, 3, 0, 10, 1, 1),),
        (m.Region(0, 3, 4, 11, 0, 2),),
        (m.Region(0, 3, 0, 10, 0, 2),) * 2,
    ],
)
def test_an_incomplete_that_makes_no_sense_fails_the_hand_off(
    missing: tuple[m.Region, ...],
) -> None:
    """More than there is would be cut into pieces without end."""
    handoffs = opened()
    handoffs.handle(PEER, m.Grant(*NAMES, first_missing_token=0), 0.0)
    handoffs.computed(make_request("r", 10).key, 10)
    finished(handoffs)
    handoffs.pump(plenty)
    abort, report = handoffs.handle(PEER, m.Incomplete(*NAMES, missing=missing), 1.0)
    assert isinstance(abort, Send) and isinstance(abort.message, m.Abort)
    assert isinstance(report, Report) and report.message.kept
    assert "makes no sense" in report.message.reason


def test_a_grant_behind_the_prompt_fails_the_hand_off() -> None:
    _, report = opened().handle(PEER, m.Grant(*NAMES, first_missing_token=11), 0.0)
    assert isinstance(report, Report) and "makes no sense" in report.message.reason


def test_a_prompt_that_waits_for_room_behind_others_has_not_stalled() -> None:
    """LMCache/LMCache #1990: transfers that shared one small buffer gave each other up."""
    handoffs = opened()
    handoffs.add(make_request("first", 4), TO, now=0.0)
    handoffs.open(make_request("first", 4).key, "coordinator", 0.0)
    handoffs.handle(PEER, m.Grant("first", 0, "coordinator", first_missing_token=0), 0.0)
    handoffs.handle(PEER, m.Grant(*NAMES, first_missing_token=0), 0.0)
    handoffs.computed(make_request("r", 10).key, 10)
    finished(handoffs)
    handoffs.pump(lambda _: 0)
    assert handoffs.before_wait(1.0) == []
    computing = Send(TO.endpoint, m.Computing(*NAMES))
    assert handoffs.before_wait(COMPUTING_EVERY_S) == [computing]
    assert handoffs.before_wait(COMPUTING_EVERY_S + 1) == []
    handoffs.sent(make_request("first", 4).key, 9.0)  # to the same peer
    stall_s = make_request("r", 10).stall_timeout_s
    assert handoffs.due() == 9.0 + stall_s
    handoffs.moved(TO.endpoint, 12.0)
    assert [a for a in handoffs.expire(9.0 + stall_s) if isinstance(a, Report)] == []
    assert computing in handoffs.before_step(13.0)
    late = handoffs.expire(12.0 + stall_s)  # nothing moves any more
    assert sum(isinstance(action, Report) for action in late) == 1


def test_a_new_coordinator_keeps_what_it_says_and_hears_nothing_of_the_rest() -> None:
    handoffs = opened()
    handoffs.add(make_request("kept", 4), TO, now=0.0)
    abort, finish = handoffs.keep_only({make_request("kept", 4).key})
    assert abort == Send(TO.endpoint, m.Abort(*NAMES))
    assert finish == Finish(make_request("r", 10).key, None)
    assert handoffs.keys == [("kept", 0)]
    assert handoffs.keep_only([])[-1] == Disconnect(TO.endpoint), "it may be dead by now"
