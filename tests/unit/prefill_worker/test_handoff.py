import pytest

from kv_transfer.chunks import region_bytes
from prefill_worker.handoff import Action, Disconnect, Finish, Handoffs, Send, SendFrame
from splitserve.wire import messages as m
from tests.unit.requests import LAYOUT, make_request

TO = ("decode-0", "tcp://d")
NAMES = ("r", 0, "epoch")


def plenty(_peer: str) -> int:
    return 1 << 30


def opened(num_tokens: int = 10, max_frame_bytes: int = 1 << 20, n: int = 1) -> Handoffs:
    handoffs = Handoffs("prefill-0", LAYOUT, max_frame_bytes)
    request = make_request("r", num_tokens, n=n)
    opening = handoffs.open(request, TO, "coordinator", now=0.0)
    assert isinstance(opening.message, m.Open)
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
    handoffs.handle(m.Grant(*NAMES, first_missing_token=0), 1.0)
    assert tokens_of(handoffs.pump(plenty)) == [(0, 4)]
    handoffs.computed(make_request("r", 10).key, 10)
    assert handoffs.prompt_finished(make_request("r", 10), [row()], 2.0) == []
    actions = handoffs.pump(plenty)
    assert tokens_of(actions) == [(4, 10)]
    assert isinstance(actions[-1], Send) and isinstance(actions[-1].message, m.Commit)
    assert actions[-1].message.num_kv_bytes == 10 * LAYOUT.token_bytes
    (finish,) = handoffs.handle(m.Received(*NAMES), 3.0)
    assert isinstance(finish, Finish) and isinstance(finish.report, m.HandedOver)
    assert finish.report.transfer_s == pytest.approx(2.0)
    assert handoffs.due() is None


def test_frames_wait_for_room_and_never_overtake_commit() -> None:
    room = LAYOUT.token_bytes
    handoffs = opened(num_tokens=4, max_frame_bytes=room)
    handoffs.handle(m.Grant(*NAMES, first_missing_token=0), 1.0)
    handoffs.computed(make_request("r", 4).key, 4)
    handoffs.prompt_finished(make_request("r", 4), [row()], 1.0)
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
    abort, finish = handoffs.prompt_finished(make_request("r", 10), [], 1.0)
    assert isinstance(abort, Send) and isinstance(abort.message, m.Abort)
    assert isinstance(finish, Finish) and isinstance(finish.report, m.HandedOver)
    assert finish.report.num_kv_bytes == 0


def test_nothing_opened_is_nothing_aborted() -> None:
    handoffs = Handoffs("prefill-0", LAYOUT, 1 << 20)
    (finish,) = handoffs.prompt_finished(make_request("r", 10), [], 1.0)
    assert isinstance(finish, Finish) and isinstance(finish.report, m.HandedOver)


def test_missing_regions_are_sent_once_more_then_the_transfer_fails() -> None:
    handoffs = opened()
    handoffs.handle(m.Grant(*NAMES, first_missing_token=0), 1.0)
    handoffs.computed(make_request("r", 10).key, 10)
    handoffs.prompt_finished(make_request("r", 10), [row()], 1.0)
    handoffs.pump(plenty)
    missing = (m.Region(0, 3, 2, 5, 0, 2),)
    handoffs.handle(m.Incomplete(*NAMES, missing=missing), 2.0)
    again = handoffs.pump(plenty)
    assert tokens_of(again) == [(2, 5)]
    assert isinstance(again[-1], Send) and isinstance(again[-1].message, m.Commit)
    abort, finish = handoffs.handle(m.Incomplete(*NAMES, missing=missing), 3.0)
    assert isinstance(abort, Send) and isinstance(abort.message, m.Abort)
    assert isinstance(finish, Finish) and isinstance(finish.report, m.Failed)
    assert finish.report.stage == "transfer"


@pytest.mark.parametrize("answer", [m.Refuse(*NAMES, reason="full", retriable=True)])
def test_a_refusal_fails_the_request_with_its_reason(answer: m.Refuse) -> None:
    (finish,) = opened().handle(answer, 1.0)
    assert isinstance(finish, Finish) and isinstance(finish.report, m.Failed)
    assert (finish.report.reason, finish.report.retriable) == ("full", True)


def test_the_stall_timer_runs_while_unanswered_and_not_while_queued() -> None:
    handoffs = opened()
    assert handoffs.due() == 10.0
    handoffs.handle(m.Queued(*NAMES), 5.0)
    assert handoffs.due() == 600.0
    handoffs.handle(m.Grant(*NAMES, first_missing_token=0), 100.0)
    handoffs.computed(make_request("r", 10).key, 10)
    handoffs.prompt_finished(make_request("r", 10), [row()], 101.0)
    assert handoffs.due() == 111.0
    assert handoffs.expire(110.9) == []
    abort, finish, disconnect = handoffs.expire(111.0)
    assert isinstance(abort, Send) and isinstance(abort.message, m.Abort)
    assert isinstance(finish, Finish) and isinstance(finish.report, m.Failed)
    assert finish.report.retriable
    assert disconnect == Disconnect(TO[1])


def test_the_deadline_ends_even_a_queued_hand_off() -> None:
    handoffs = opened()
    handoffs.handle(m.Queued(*NAMES), 5.0)
    _, finish = handoffs.expire(600.0)
    assert isinstance(finish, Finish) and isinstance(finish.report, m.Failed)
    assert finish.report.stage == "deadline"


def test_answers_to_a_released_attempt_do_nothing() -> None:
    handoffs = opened()
    (abort,) = handoffs.release(make_request("r", 10).key)
    assert isinstance(abort, Send) and isinstance(abort.message, m.Abort)
    assert handoffs.release(make_request("r", 10).key) == []
    for answer in (m.Grant(*NAMES, first_missing_token=0), m.Received(*NAMES), m.AbortAck(*NAMES)):
        assert handoffs.handle(answer, 1.0) == []
    assert handoffs.pump(plenty) == []
