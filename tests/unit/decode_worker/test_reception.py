"""Opens, frames, Commits, Aborts, Releases and deaths in every order that hypothesis thinks of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from decode_worker import incoming as i
from decode_worker.answers import Answers
from decode_worker.intake import Intake, IntakeLimits
from decode_worker.reception import Reception
from decode_worker.refusals import Here
from decode_worker.scheduler import DecodeScheduler
from decode_worker.tombstones import UNKNOWN_DEADLINE_S
from kv_transfer.base import FrameWritten, TransferKey
from splitserve.draining import Draining
from splitserve.request import Sampling
from splitserve.scheduling.block_manager import BlockManager
from splitserve.scheduling.prefix_cache import PrefixCache
from splitserve.scheduling.sequence import Request, RequestKey
from splitserve.wire import messages as m
from tests.unit.requests import LAYOUT

NAMES = st.sampled_from(["a", "b", "c"])
ATTEMPTS = st.integers(0, 2)
WORKERS = st.sampled_from(["p0", "p1", "p2"])
NUM_TOKENS = 9
DEADLINE_S, STALL_S, MAX_STEP_S = 50.0, 5.0, 10.0


@dataclass
class NoCopies:
    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        pass


class Decode(RuleBasedStateMachine):
    """A decode worker without sockets, tensors and time."""

    keeps_prefixes = False

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.blocks = BlockManager(8)
        cache = PrefixCache(self.blocks, LAYOUT.block_size, self.keeps_prefixes)
        self.scheduler = DecodeScheduler(self.blocks, LAYOUT.block_size, 64, cache)
        limits = IntakeLimits(8, vocab_size=100, max_model_len=100, max_step_s=MAX_STEP_S)
        self.intake = Intake(LAYOUT, self.blocks, limits, self.scheduler.cache)
        answers = Answers(self.scheduler, NoCopies(), LAYOUT.block_size, lambda: self.now)
        self.answers = answers
        here = Here("decode", "epoch", LAYOUT)
        self.reception = Reception(self.intake, self.scheduler, answers.prompts, Draining(), here)
        self.grants: dict[RequestKey, tuple[int, ...]] = {}  # of the receiver
        self.over: list[tuple[str, int, float]] = []  # name, attempt and before, until
        self.unanswered: set[RequestKey] = set()
        self.dead: set[str] = set()
        self.quarantined: dict[str, int] = {}

    # -- what a worker does with actions ---------------------------------------------------------

    def act(self, actions: list[i.Action]) -> None:
        for action in actions:
            match action:
                case i.Reply(_, message):
                    self.unanswered.discard(RequestKey(message.request_id, message.attempt))
                case i.AcceptFrames(key, block_ids, _, first):
                    self.grants[key] = block_ids[first // LAYOUT.block_size :]
                case i.Drop(key, known):
                    del self.grants[key]
                    self.blocks.cancel(key)
                    self.blocks.free(known.block_ids)
                case i.Quarantine(key, known, writer):
                    self.blocks.free(known.block_ids)
                    self.quarantined.setdefault(writer, 0)
                    self.quarantined[writer] += len(self.grants.pop(key))
                    self.blocks.quarantine(key, writer)
                case i.EndQuarantine(writer):
                    self.quarantined.pop(writer, None)
                    self.blocks.end_quarantine(writer)
                case i.Begin(request):
                    del self.grants[request.key]
                    missing = self.blocks.commit(request.key)
                    self.answers.begin(action, [*action.known.block_ids, *missing])
                case i.BeginLocal():
                    self.answers.begin_local(action)
                case i.Report(message):
                    key = RequestKey(message.request_id, message.attempt)
                    self.answers.prompts.forget(key)

    def hear(self, message: Any, worker: str = "p0") -> None:
        self.act(self.reception.handle(worker, message, self.now))

    def asked(self, kind: type[Any], name: str, attempt: int, **more: Any) -> Any:
        return kind(
            request_id=name,
            attempt=attempt,
            epoch="epoch",
            token_ids=tuple(range(NUM_TOKENS)),
            num_prompt_tokens=NUM_TOKENS,
            choices=(m.Choice(0, 7),),
            sampling=Sampling(max_tokens=8),
            deadline_s=DEADLINE_S,
            stall_timeout_s=STALL_S,
            **more,
        )

    # -- what comes in ---------------------------------------------------------------------------

    @rule(name=NAMES, attempt=ATTEMPTS, worker=WORKERS)
    def open(self, name: str, attempt: int, worker: str) -> None:
        to = {"to_worker_id": "decode", "from_worker_id": worker, "reply_to": "", "layout": LAYOUT}
        self.unanswered.add(RequestKey(name, attempt))
        self.hear(self.asked(m.Open, name, attempt, **to), worker)
        self.overtake(name, attempt)

    @rule(name=NAMES, attempt=ATTEMPTS)
    def prefill_here(self, name: str, attempt: int) -> None:
        self.act(self.reception.prefill(self.asked(m.Prefill, name, attempt), self.now))
        self.overtake(name, attempt)

    def overtake(self, name: str, attempt: int) -> None:
        if RequestKey(name, attempt) in self.reception.held():
            deadline = next(r.deadline for r in self.requests() if r.key.request_id == name)
            self.over.append((name, attempt - 1, deadline))

    @rule(name=NAMES, attempt=ATTEMPTS, start=st.integers(0, NUM_TOKENS - 1))
    def frame(self, name: str, attempt: int, start: int) -> None:
        """Only what the receiver has a grant for is written."""
        if (name, attempt) in self.grants:
            for first in {0, start}:
                region = m.Region(0, 3, first, NUM_TOKENS, 0, 2)
                written = FrameWritten(TransferKey(name, attempt), region, 1)
                self.act(self.intake.written(written, self.now))

    @rule(name=NAMES, attempt=ATTEMPTS)
    def commit(self, name: str, attempt: int) -> None:
        rows = (m.TokenRow(name, attempt, 0, 0, (5,)),)
        self.hear(m.Commit(name, attempt, "epoch", rows, 0))

    @rule(name=NAMES, attempt=ATTEMPTS, worker=WORKERS)
    def all_goes_well(self, name: str, attempt: int, worker: str) -> None:
        self.open(name, attempt, worker)
        self.admit()
        self.frame(name, attempt, 0)
        self.commit(name, attempt)

    @rule(name=NAMES, attempt=ATTEMPTS)
    def computing(self, name: str, attempt: int) -> None:
        self.hear(m.Computing(name, attempt, "epoch"))

    @rule(name=NAMES, attempt=ATTEMPTS)
    def abort(self, name: str, attempt: int) -> None:
        """It does not end an answer that is being written: then Received was lost."""
        written = [s.request.key for s in self.scheduler.sequences]
        if RequestKey(name, attempt) in written:
            (reply,) = self.reception.handle("p0", m.Abort(name, attempt, "epoch"), self.now)
            assert reply == i.Reply("p0", m.Received(name, attempt, "epoch"))
            return
        deadlines = [r.deadline for r in self.requests() if r.key.request_id == name]
        self.hear(m.Abort(name, attempt, "epoch"))
        until = deadlines[0] if deadlines else self.now + UNKNOWN_DEADLINE_S
        self.over.append((name, attempt, until))

    @rule(name=NAMES, attempt=ATTEMPTS)
    def release(self, name: str, attempt: int) -> None:
        self.act(self.reception.end(RequestKey(name, attempt), self.now + 20.0, self.now))
        self.over.append((name, attempt, self.now + 20.0))
        self.forget_question(name, attempt)

    @rule(worker=WORKERS, reaped=st.booleans())
    def peer_gone(self, worker: str, reaped: bool) -> None:
        self.act(self.intake.peer_gone(worker, reaped, one_sided=True))
        self.dead.add(worker)
        held = self.reception.held()
        self.unanswered = {key for key in self.unanswered if key in held}

    @rule()
    def another_coordinator(self) -> None:
        self.act(self.reception.keep_only(()))
        self.unanswered.clear()
        assert self.reception.held() == []

    # -- what the worker does by itself ----------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, STALL_S, 2 * MAX_STEP_S, DEADLINE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.act(self.intake.expire(self.now))

    @rule()
    def admit(self) -> None:
        spare = 0 if self.scheduler.num_preempted else self.scheduler.spare_blocks
        self.act(self.intake.admit(spare, self.scheduler.num_choices, self.now))
        assert not self.unanswered, "an Open got no answer"

    @rule()
    def an_answer_ends(self) -> None:
        for sequence in self.scheduler.sequences[:1]:
            self.scheduler.release(sequence.request.key)
            self.answers.prompts.forget(sequence.request.key)

    def requests(self) -> list[Request]:
        incoming = [self.intake.incoming(key.request_id) for key in self.intake.keys]
        answers = [s.request for s in self.scheduler.sequences]
        return [*answers, *(one.request for one in incoming if one is not None)]

    def forget_question(self, name: str, attempt: int) -> None:
        self.unanswered = {
            key for key in self.unanswered if key.request_id != name or key.attempt > attempt
        }

    # -- what must hold --------------------------------------------------------------------------

    @invariant()
    def every_block_has_one_owner(self) -> None:
        self.blocks.check()
        counts = self.blocks.counts
        assert counts.quarantined == sum(self.quarantined.values())
        granted = sum(len(block_ids) for block_ids in self.grants.values())
        assert counts.reserved == granted + counts.quarantined

    @invariant()
    def one_attempt_at_a_request_and_none_that_is_over(self) -> None:
        held = self.reception.held()
        assert len({key.request_id for key in held}) == len(held)
        for name, attempt, until in self.over:
            if self.now < until:
                assert all(key.attempt > attempt for key in held if key.request_id == name)

    @invariant()
    def the_receiver_takes_frames_of_granted_transfers_only(self) -> None:
        assert len(self.grants) == self.intake.num_granted
        assert set(self.grants) <= set(self.intake.keys)

    @invariant()
    def nothing_waits_without_an_end(self) -> None:
        due = self.intake.due()
        assert self.intake.idle or (due is not None and due <= self.now + DEADLINE_S)

    def teardown(self) -> None:
        self.another_coordinator()
        for worker in ("p0", "p1", "p2"):
            self.peer_gone(worker, reaped=True)
        assert self.blocks.counts.free + self.blocks.counts.cached == self.blocks.counts.total
        assert self.keeps_prefixes or self.blocks.counts.cached == 0
        assert not self.answers.prompts


class CachingDecode(Decode):
    """All prompts are alike."""

    keeps_prefixes = True


ENOUGH = settings(max_examples=150, stateful_step_count=40, deadline=None)
Decode.TestCase.settings = CachingDecode.TestCase.settings = ENOUGH
TestDecode = Decode.TestCase
TestCachingDecode = CachingDecode.TestCase
