import pytest

from decode_worker import incoming as i
from decode_worker.intake import MAX_PASSES, Intake, IntakeLimits
from kv_transfer.base import FrameDropped, FrameWritten, TransferKey
from splitserve.scheduling.block_manager import BlockManager
from splitserve.scheduling.prefix_cache import PrefixCache
from splitserve.scheduling.sequence import RequestKey
from splitserve.wire import messages as m
from tests.unit.requests import LAYOUT, make_request

FROM = i.Sender("prefill-0", "peer")


def intake(num_blocks: int = 8, max_num_seqs: int = 8, enabled: bool = False) -> Intake:
    blocks = BlockManager(num_blocks)
    limits = IntakeLimits(max_num_seqs, vocab_size=100, max_model_len=1000)
    return Intake(LAYOUT, blocks, limits, PrefixCache(blocks, LAYOUT.block_size, enabled))


def admit(state: Intake, now: float = 0.0) -> list[i.Action]:
    return state.admit(state.blocks.num_free, 0, now)


def arrived(name: str, start: int, end: int) -> FrameWritten:
    return FrameWritten(TransferKey(name, 0), m.Region(0, 3, start, end, 0, 2), 100)


def commit(name: str, *choice_ids: int) -> m.Commit:
    rows = tuple(m.TokenRow(name, 0, c, 0, (5,)) for c in choice_ids or (0,))
    return m.Commit(name, 0, "epoch", rows, 0)


def kinds(actions: list[i.Action] | None) -> list[str]:
    assert actions is not None
    names = [a.message if isinstance(a, i.Reply | i.Report) else a for a in actions]
    return [type(name).__name__ for name in names]


def test_blocks_accept_frames_before_the_grant_goes_out() -> None:
    state = intake()
    state.add(make_request("a", 9), FROM)
    assert kinds(admit(state)) == ["AcceptFrames", "Grant"]
    assert state.blocks.counts.reserved == 3  # nine tokens and the first new one


def test_a_commit_with_every_byte_begins() -> None:
    state = intake()
    state.add(make_request("a", 9), FROM)
    admit(state)
    state.written(arrived("a", 0, 4), 1.0)
    state.written(arrived("a", 4, 9), 2.0)
    assert kinds(state.commit(commit("a"), 3.0)) == ["Begin", "Received"]
    assert state.idle


def test_what_a_commit_lay_unseen_is_told_and_counts_here() -> None:
    """The loop was in a step when it came: that is no part of the transfer."""
    state = intake()
    state.add(make_request("a", 9), FROM)
    admit(state)
    state.written(arrived("a", 0, 9), 2.5)
    actions = state.commit(commit("a"), 3.0, at=1.0)
    assert actions is not None
    begin, reply = actions
    assert isinstance(begin, i.Begin) and begin.whole_at == 1.0
    assert isinstance(reply, i.Reply) and reply.message == m.Received("a", 0, "epoch", waited_s=2.0)


def test_a_commit_with_a_hole_names_it_once_then_fails() -> None:
    state = intake()
    state.add(make_request("a", 9), FROM)
    admit(state)
    state.written(arrived("a", 0, 4), 1.0)
    assert state.commit(commit("a"), 3.0) == []
    (reply,) = state.expire(3.0 + i.LATE_FRAME_S)
    assert isinstance(reply, i.Reply)
    assert reply.message == m.Incomplete("a", 0, "epoch", (m.Region(0, 3, 4, 9, 0, 2),))
    assert state.commit(commit("a"), 5.0) == []
    assert kinds(state.expire(5.0 + i.LATE_FRAME_S)) == ["Drop", "AbortAck", "Failed"]
    assert state.commit(commit("a"), 7.0) is None


def test_frames_may_come_behind_their_commit() -> None:
    """LMCache/LMCache #1350: decode looked for KV before it was there, and failed."""
    state = intake()
    state.add(make_request("a", 9), FROM)
    admit(state)
    assert state.commit(commit("a"), 3.0) == []
    assert state.due() == 3.0 + i.LATE_FRAME_S
    assert state.written(arrived("a", 4, 9), 3.5) == []
    assert state.due() == 3.5 + i.LATE_FRAME_S
    assert kinds(state.written(arrived("a", 0, 4), 4.0)) == ["Begin", "Received"]
    assert state.idle


def test_a_spoilt_frame_is_asked_for_at_once() -> None:
    state = intake()
    state.add(make_request("a", 9), FROM)
    admit(state)
    state.written(arrived("a", 0, 4), 1.0)
    state.dropped(FrameDropped(TransferKey("a", 0), "the checksum does not match"))
    assert kinds(state.commit(commit("a"), 3.0)) == ["Incomplete"]
    assert state.commit(commit("a"), 3.1) == []  # what was sent again may be late too
    assert kinds(state.written(arrived("a", 4, 9), 3.2)) == ["Begin", "Received"]


def test_a_peer_may_be_in_a_long_step_when_it_is_asked_for_more() -> None:
    """It hears the Incomplete behind its step; a stall timer gave it ten seconds."""
    state = intake()
    state.add(make_request("a", 9), FROM)
    admit(state)
    state.written(arrived("a", 0, 4), 1.0)
    state.commit(commit("a"), 3.0)
    asked_at = 3.0 + i.LATE_FRAME_S
    assert kinds(state.expire(asked_at)) == ["Incomplete"]
    step_s = state.limits.max_step_s
    assert state.expire(asked_at + step_s) == []
    state.written(arrived("a", 4, 9), asked_at + step_s)
    assert kinds(state.commit(commit("a"), asked_at + step_s)) == ["Begin", "Received"]


@pytest.mark.parametrize("choice_ids", [(3,), (0, 0)])
def test_a_commit_that_does_not_fit_its_open_fails(choice_ids: tuple[int, ...]) -> None:
    state = intake()
    state.add(make_request("a", 3, n=2), FROM)
    admit(state)
    state.written(arrived("a", 0, 3), 1.0)
    assert kinds(state.commit(commit("a", *choice_ids), 2.0)) == ["Drop", "AbortAck", "Failed"]


@pytest.mark.parametrize(
    "row",
    [
        m.TokenRow("b", 0, 0, 0, (5,)),
        m.TokenRow("a", 1, 0, 0, (5,)),
        m.TokenRow("a", 0, 0, 1, (5,)),
        m.TokenRow("a", 0, 0, 0, (5, 6)),
        m.TokenRow("a", 0, 0, 0, (100,)),
    ],
)
def test_an_impossible_first_token_never_reaches_a_batch(row: m.TokenRow) -> None:
    state = intake()
    state.add(make_request("a", 3), FROM)
    admit(state)
    state.written(arrived("a", 0, 3), 1.0)
    message = m.Commit("a", 0, "epoch", (row,), 0)
    assert kinds(state.commit(message, 2.0)) == ["Drop", "AbortAck", "Failed"]


def test_a_commit_without_a_grant_is_not_served() -> None:
    state = intake(num_blocks=2)
    assert state.commit(commit("a"), 1.0) is None
    state.add(make_request("a", 9), FROM)
    admit(state)
    assert state.commit(commit("a"), 1.0) is None


def test_who_waits_hears_it_once() -> None:
    state = intake(num_blocks=4)
    state.add(make_request("a", 9), FROM)
    state.add(make_request("b", 9), FROM)
    assert kinds(admit(state)) == ["AcceptFrames", "Grant", "Queued"]
    assert kinds(admit(state)) == []
    drops = state.release(RequestKey("a", 0))
    assert kinds(drops) == ["Drop"]
    state.blocks.cancel(RequestKey("a", 0))
    assert kinds(admit(state)) == ["AcceptFrames", "Grant"]


def test_a_few_younger_ones_pass_then_room_is_kept() -> None:
    state = intake(num_blocks=9)
    state.blocks.reserve("busy", 1)
    state.add(make_request("large", 32), FROM)
    passed = 0
    for number in range(8):
        state.add(make_request(str(number), 1), FROM)
        passed += kinds(admit(state)).count("Grant")
    assert passed == MAX_PASSES
    state.blocks.cancel("busy")
    for number in range(8):
        for action in state.release(RequestKey(str(number), 0)):
            assert isinstance(action, i.Drop)
            state.blocks.cancel(action.key)
    state.add(make_request("last", 1), FROM)
    (accept, grant) = admit(state)[:2]
    assert isinstance(accept, i.AcceptFrames) and accept.key.request_id == "large"
    assert isinstance(grant, i.Reply)


def test_choices_count_against_max_num_seqs() -> None:
    state = intake(max_num_seqs=3)
    state.add(make_request("a", 3, n=2), FROM)
    state.add(make_request("b", 3, n=2), FROM)
    assert kinds(admit(state)) == ["AcceptFrames", "Grant", "Queued"]
    assert state.never_fits(make_request("c", 3, n=4))


def test_a_local_prompt_takes_its_blocks_from_the_same_line() -> None:
    state = intake(num_blocks=4)
    state.add(make_request("a", 9), FROM)
    state.add(make_request("b", 5), None)
    assert kinds(admit(state)) == ["AcceptFrames", "Grant"]
    assert kinds(state.release(RequestKey("a", 0))) == ["Drop"]
    state.blocks.cancel(RequestKey("a", 0))
    (begin,) = admit(state)
    assert isinstance(begin, i.BeginLocal)
    assert len(begin.block_ids) == 2


def test_a_stalled_transfer_is_dropped_and_a_waiting_one_is_not() -> None:
    state = intake(num_blocks=4)
    state.add(make_request("a", 9), FROM)
    state.add(make_request("b", 9), FROM)
    admit(state, now=1.0)
    state.written(arrived("a", 0, 4), 5.0)
    assert state.due() == 15.0
    assert state.expire(14.9) == []
    assert kinds(state.expire(15.0)) == ["Drop", "AbortAck", "Failed"]
    assert state.due() == 600.0


def test_a_deadline_ends_who_waits() -> None:
    state = intake(num_blocks=1)
    state.add(make_request("a", 9, deadline=7.0), FROM)
    admit(state)
    actions = state.expire(7.0)
    assert kinds(actions) == ["AbortAck", "Failed"]
    assert state.idle


def test_frames_of_a_forgotten_transfer_count_for_nothing() -> None:
    state = intake()
    state.written(arrived("a", 0, 9), 1.0)
    state.add(make_request("a", 9), FROM)
    admit(state)
    assert state.commit(commit("a"), 2.0) == []
    assert kinds(state.expire(2.0 + i.LATE_FRAME_S)) == ["Incomplete"]


@pytest.mark.parametrize(
    ("one_sided", "reaped", "expected"),
    [
        (False, False, ["Drop"]),
        (False, True, ["EndQuarantine", "Drop"]),
        (True, False, ["Quarantine"]),
        (True, True, ["EndQuarantine", "Drop"]),
    ],
)
def test_a_dead_peer_may_still_write_only_to_what_it_writes_by_itself(
    one_sided: bool, reaped: bool, expected: list[str]
) -> None:
    state = intake(num_blocks=8)
    state.add(make_request("granted", 9), FROM)
    state.add(make_request("waiting", 30), FROM)
    state.add(make_request("other", 9), i.Sender("prefill-1", "peer-1"))
    admit(state)
    assert kinds(state.peer_gone("prefill-0", reaped, one_sided)) == expected
    assert state.keys == [("other", 0)]
    assert state.is_gone("prefill-0") and not state.is_gone("prefill-1")


def test_a_peer_that_computes_has_as_long_as_a_step_may_last() -> None:
    state = intake()
    state.add(make_request("a", 9), FROM)
    admit(state, now=0.0)
    assert state.due() == 90.0  # it may be in a step since before the Grant
    state.written(arrived("a", 0, 4), 50.0)
    assert state.due() == 60.0
    assert state.computing(m.Computing("a", 0, "epoch"), 51.0) == []
    assert state.due() == 141.0
    assert state.computing(m.Computing("a", 1, "epoch"), 51.0) is None


def test_a_prompt_whose_peer_can_not_be_answered_is_given_up() -> None:
    state = intake()
    state.add(make_request("a", 9), FROM)
    admit(state)
    assert state.unreachable(RequestKey("a", 1)) == []
    assert kinds(state.unreachable(RequestKey("a", 0))) == ["Drop", "AbortAck", "Failed"]
    assert state.idle


def begun(state: Intake, name: str, num_tokens: int) -> None:
    """A prompt came in, is decoded, and its blocks are cached."""
    state.add(make_request(name, num_tokens), FROM)
    admit(state)
    state.written(arrived(name, 0, num_tokens), 1.0)
    begin = (state.commit(commit(name), 2.0) or [])[0]
    assert isinstance(begin, i.Begin)
    block_ids = [*begin.known.block_ids, *state.blocks.commit(begin.request.key)]
    state.cache.insert(begin.known.node, begin.request.token_ids, block_ids, num_tokens)
    state.cache.release(begin.request.key)


def test_only_what_is_missing_is_asked_for() -> None:
    """Blocks that are here come first, and are not to be written."""
    state = intake(num_blocks=16, enabled=True)
    begun(state, "a", 8)
    state.add(make_request("b", 13), FROM)
    accept, reply = admit(state)
    assert isinstance(accept, i.AcceptFrames) and isinstance(reply, i.Reply)
    assert (accept.num_tokens, accept.first_missing_token) == (13, 8)
    assert reply.message == m.Grant("b", 0, "epoch", 8)
    assert state.commit(commit("b"), 3.0) == []
    assert kinds(state.written(arrived("b", 8, 13), 4.0)) == ["Begin", "Received"]


def test_a_prompt_that_is_here_begins_with_its_commit() -> None:
    """vllm-project/vllm PR#18632, #25267: nothing was pulled, and the other side never heard."""
    state = intake(num_blocks=16, enabled=True)
    begun(state, "a", 8)
    state.add(make_request("b", 8), FROM)
    assert kinds(admit(state)) == ["AcceptFrames", "Grant"]
    assert kinds(state.commit(commit("b"), 3.0)) == ["Begin", "Received"]


def test_who_begins_alike_waits_until_that_is_here_or_lost() -> None:
    state = intake(num_blocks=32, enabled=True)
    for name in "abc":
        state.add(make_request(name, 9), FROM)
    assert kinds(admit(state)) == ["AcceptFrames", "Grant", "Queued", "Queued"]
    assert kinds(admit(state)) == []
    (drop,) = state.release(RequestKey("a", 0))
    assert isinstance(drop, i.Drop)
    state.blocks.cancel(drop.key)
    state.blocks.free(drop.known.block_ids)
    assert kinds(admit(state)) == ["AcceptFrames", "Grant"]  # of b; c waits on
    assert state.num_waiting == 1


def test_what_this_worker_computes_lacks_at_least_its_last_token() -> None:
    """GeeeekExplorer/nano-vllm#144: a prompt of whole blocks, all cached, left nothing to run."""
    state = intake(num_blocks=16, enabled=True)
    begun(state, "a", 8)
    state.add(make_request("b", 8), None)
    (begin,) = admit(state)
    assert isinstance(begin, i.BeginLocal)
    assert begin.known.num_tokens == 4
