"""The decode worker: takes KV in and writes answers, one token a step for the whole batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from decode_worker import incoming as i
from decode_worker.answers import Answers
from decode_worker.attribution import Account
from decode_worker.intake import Intake, IntakeLimits
from decode_worker.reception import Reception
from decode_worker.refusals import Here
from decode_worker.scheduler import DecodeScheduler
from kv_transfer.base import FrameDropped, FrameWritten, KVReceiver, TransferKey
from splitserve.draining import Draining
from splitserve.engine.step import compute
from splitserve.logs import LimitedLog
from splitserve.membership import (
    CoordinatorLost,
    EpochChanged,
    Membership,
    TerminationRequested,
)
from splitserve.profiling.observer import Observer
from splitserve.profiling.recorder import Recorder
from splitserve.scheduling.block_manager import BlockManager
from splitserve.scheduling.prefix_cache import PrefixCache
from splitserve.scheduling.sequence import Request, RequestKey
from splitserve.wire import messages as m
from splitserve.wire.channel import (
    COORDINATOR,
    Channel,
    ChannelFailed,
    ControlReceived,
    DataReceived,
    FirstTokenSent,
    SendFailed,
)

if TYPE_CHECKING:  # the loop itself needs no torch
    from splitserve.engine.model_runner import ModelRunner

Order = m.Release | m.PeerGone | m.Drain | m.Observe | m.ResetPrefixCache

log = logging.getLogger(__name__)
limited = LimitedLog(log)


class DecodeWorker:
    """Owns the loop of one decode process."""

    def __init__(
        self,
        runner: ModelRunner,
        channel: Channel,
        receiver: KVReceiver,
        membership: Membership,
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.blocks = BlockManager(runner.num_blocks)
        block_size, budget = runner.layout.block_size, runner.max_num_batched_tokens
        cache = PrefixCache(self.blocks, block_size, runner.config.enable_prefix_caching)
        self.scheduler = DecodeScheduler(self.blocks, block_size, budget, cache)
        max_num_seqs, max_step_s = runner.config.max_num_seqs, membership.max_step_s
        limits = IntakeLimits(max_num_seqs, runner.vocab_size, runner.max_model_len, max_step_s)
        self.intake = Intake(runner.layout, self.blocks, limits, cache)
        self._runner = runner
        self._channel = channel
        self._receiver = receiver
        self._membership = membership
        self._recorder = recorder
        self._observer = Observer(membership.worker_id, recorder, runner)
        self._clock = clock
        self._answers = Answers(self.scheduler, runner, block_size, clock)
        self._prompts = self._answers.prompts
        self._moved = False  # the last turn computed something
        self._draining = Draining(membership.drain_grace_s)
        self.reception = Reception(
            self.intake, self.scheduler, self._prompts, self._draining, self._here()
        )
        self._account = Account(
            self.scheduler, self.intake, max_num_seqs, runner.max_num_batched_tokens
        )

    def run(self) -> None:
        """Until drained: take what came, admit, compute one step, report its tokens."""
        lap = self._recorder.lap
        while not self._done():
            wait_s, waiting = self._wait_s(), self._account.waits_for
            events = self._membership.receive(wait_s)
            lap("receive" if wait_s == 0 else waiting)
            for event in events:
                self.take(event)
            lap("receive")
            self.expire()
            self.admit()
            self.compute()
            self.report()
            lap("send")
            self._recorder.turned()
            self._membership.turn(self.stats())
            self.check_when_idle()
            for report in self._observer.turned(self._clock()):
                self._channel.send_control(report)
            lap("other")

    def take(self, event: object) -> None:
        """One event of the inbox."""
        match event:
            case ControlReceived(message, at):
                self._take_control(message, at)
            case DataReceived(peer, message, at):
                self.act(self.reception.handle(peer, message, self._clock(), at))
            case FrameWritten():
                self._account.num_kv_bytes += event.num_bytes
                self.act(self.intake.written(event, self._clock()))
            case FrameDropped(key, reason):
                self.intake.dropped(event)
                self._account.num_frames_dropped += 1
                limited.warning("frame", f"dropped a frame of {key.request_id}: {reason}")
            case SendFailed(peer, message):
                self._send_failed(peer, message)
            case TerminationRequested():
                self._draining.signalled(self._clock())
                self._membership.start_draining()
            case FirstTokenSent():
                pass  # of a prompt computed here: nothing is handed over
            case EpochChanged() | CoordinatorLost():
                self._coordinator_changed(event)
            case ChannelFailed(reason):
                raise RuntimeError(f"the I/O thread ended: {reason}")
            case _:
                log.warning("unexpected event %s", event)

    def expire(self) -> None:
        """Give up what is late."""
        now = self._clock()
        self.act(self.intake.expire(now))
        late = {s.request.key: s.request for s in self.scheduler.sequences}
        for request in late.values():
            if request.deadline <= now:
                self._fail(request, "deadline", "the request's deadline passed", retriable=False)

    def admit(self) -> None:
        """Room that running and preempted sequences leave goes to prompts that wait."""
        spare = 0 if self.scheduler.num_preempted else self.scheduler.spare_blocks
        self.act(self.intake.admit(spare, self.scheduler.num_choices, self._clock()))

    def compute(self) -> None:
        """One forward pass: a token for each answer, and chunks of prompts."""
        plan = self.scheduler.schedule()
        self._moved = bool(plan)
        self._recorder.lap("schedule")
        if not plan:
            return
        now = self._clock()
        for planned in plan:
            self._prompts.started(planned.sequence.request.key, now)
        results = compute(self._runner, plan)
        self._recorder.stepped(self._account.step_of(plan), self._runner.take_spent())
        self._account.num_steps += 1
        failed: dict[RequestKey, tuple[Request, str]] = {}
        for planned, result in zip(plan, results, strict=True):
            if isinstance(result, str):
                failed[planned.sequence.request.key] = (planned.sequence.request, result)
            else:
                self.scheduler.computed([planned])
                self._answers.take(planned, result)
        for request, reason in failed.values():
            self._fail(request, "decode", reason)

    def report(self) -> None:
        """First tokens of prompts computed here, then all tokens of the step in one message."""
        for first in self._answers.first_tokens:
            self._channel.send_control(first)
        if self._answers.rows:
            self._channel.send_control(self._answers.tokens(self._membership.epoch))
        self._answers.first_tokens.clear()
        self._answers.rows.clear()

    def act(self, actions: list[i.Action]) -> None:
        """Carry actions of the intake out, in order."""
        for action in actions:
            match action:
                case i.Reply(peer, message):
                    self._channel.send_data(peer, message)
                case i.AcceptFrames(key, block_ids, num_tokens, first):
                    self._receiver.grant(TransferKey(*key), block_ids, num_tokens, first)
                case i.Drop(key, known):
                    self._receiver.revoke(TransferKey(*key))
                    self.blocks.cancel(key)
                    self.blocks.free(known.block_ids)
                case i.Quarantine(key, known, writer):
                    self._receiver.revoke(TransferKey(*key))
                    self.blocks.quarantine(key, writer)
                    self.blocks.free(known.block_ids)
                case i.EndQuarantine(writer):
                    self.blocks.end_quarantine(writer)
                case i.Begin():
                    key = action.request.key
                    self._receiver.revoke(TransferKey(*key))
                    missing = self.blocks.commit(key)
                    self._answers.begin(action, [*action.known.block_ids, *missing])
                case i.BeginLocal():
                    self._answers.begin_local(action)
                case i.Report(message):
                    self._prompts.forget(RequestKey(message.request_id, message.attempt))
                    self._channel.send_control(message)

    def stats(self) -> m.WorkerStats:
        return self._account.stats(self._answers, self._recorder.evidence)

    def check_when_idle(self) -> None:
        """Invariants that must hold when nothing is here."""
        if not self.scheduler.sequences and self.intake.idle:
            self.blocks.check()
            counts = self.blocks.counts
            assert counts.used == 0, "blocks are held by nobody"
            assert counts.reserved == counts.quarantined, "a reservation is nobody's"
            assert not self._prompts, "a prompt was not forgotten"

    def _coordinator_changed(self, event: EpochChanged | CoordinatorLost) -> None:
        """When it is lost, the loop turns, and leaves if it drains."""
        if isinstance(event, EpochChanged) and event.epoch != self._membership.epoch:
            self._membership.rejoin(tuple(m.Held(*key) for key in self.reception.held()))

    def _take_control(self, message: m.ToWorker | m.ToLauncher, at: float) -> None:
        match message:
            case m.Welcome(_, keep):
                if self._membership.welcomed(message):
                    self.reception.here = self._here()
                    kept = {RequestKey(held.request_id, held.attempt) for held in keep}
                    self.act(self.reception.keep_only(kept))
            case m.Prefill():
                self.act(self.reception.prefill(message, at))
            case _ if isinstance(message, Order):
                if message.epoch == self._membership.epoch:
                    self._obey(message, self._clock())
            case _:
                log.warning("unexpected message %s", message)

    def _obey(self, message: Order, now: float) -> None:
        """What the coordinator of this epoch says of what is here."""
        match message:
            case m.Release(request_id, attempt, _, deadline_s):
                key = RequestKey(request_id, attempt)
                self.act(self.reception.end(key, now + deadline_s, now))
            case m.PeerGone(worker_id, _, reaped):
                self.act(self.intake.peer_gone(worker_id, reaped, self._receiver.one_sided))
            case m.Drain(_, deadline_s):
                self._draining.told(deadline_s, now)
                self._membership.start_draining()
            case m.Observe():
                self._observer.begin(message, now)
            case m.ResetPrefixCache():
                self.scheduler.cache.clear()

    def _fail(self, request: Request, stage: m.Stage, reason: str, retriable: bool = True) -> None:
        self.act(self.reception.forget(request.key))
        failed = m.Failed(*request.key, request.epoch, stage, reason, retriable)
        self._channel.send_control(failed)

    def _send_failed(self, peer: str, message: m.Message) -> None:
        if peer == COORDINATOR:
            if self._membership.connected:
                raise RuntimeError(f"could not tell the coordinator {type(message).__name__}")
            return  # the next one asks what is here
        log.warning("could not send %s to %s", type(message).__name__, peer)
        if isinstance(message, m.Grant | m.Queued | m.Incomplete):
            self.act(self.intake.unreachable(RequestKey(message.request_id, message.attempt)))

    def _here(self) -> Here:
        return Here(self._membership.worker_id, self._membership.epoch, self._runner.layout)

    def _wait_s(self) -> float | None:
        if self._moved:
            return 0
        dues = [s.request.deadline for s in self.scheduler.sequences]
        dues += [
            self._draining.due,
            self._recorder.due(self._account.waits_for),
            self._observer.due(),
        ]
        due = min([*dues, self.intake.due() or float("inf")])
        return None if due == float("inf") else max(0.0, due - self._clock())

    def _done(self) -> bool:
        idle = not self.scheduler.sequences and self.intake.idle
        return self._draining.over(idle, self._membership.connected, self._clock())
