"""The decode worker: takes KV in and writes answers, one token a step for the whole batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from decode_worker import intake as i
from decode_worker.answers import Answers
from decode_worker.intake import Intake, IntakeLimits
from decode_worker.scheduler import DecodeScheduler
from kv_transfer.base import FrameDropped, FrameWritten, KVReceiver, TransferKey
from splitserve.engine.step import compute
from splitserve.logs import LimitedLog
from splitserve.membership import Membership, TerminationRequested
from splitserve.scheduling.block_manager import BlockManager
from splitserve.scheduling.sequence import Request, RequestKey
from splitserve.wire import messages as m
from splitserve.wire.channel import (
    COORDINATOR,
    Channel,
    ChannelFailed,
    ControlReceived,
    DataReceived,
    SendFailed,
)

if TYPE_CHECKING:  # the loop itself needs no torch
    from splitserve.engine.model_runner import ModelRunner

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.blocks = BlockManager(runner.num_blocks)
        self.scheduler = DecodeScheduler(
            self.blocks, runner.layout.block_size, runner.max_num_batched_tokens
        )
        limits = IntakeLimits(runner.config.max_num_seqs, runner.vocab_size)
        self.intake = Intake(runner.layout, self.blocks, limits)
        self._runner = runner
        self._channel = channel
        self._receiver = receiver
        self._membership = membership
        self._clock = clock
        self._answers = Answers(self.scheduler, runner, runner.layout.block_size, clock)
        self._prompts = self._answers.prompts
        self._moved = False  # the last turn computed something
        self._draining = False
        self._drain_due = float("inf")
        self._num_kv_bytes = 0
        self._num_frames_dropped = 0
        self._num_steps = 0

    def run(self) -> None:
        """Until drained: take what came, admit, compute one step, report its tokens."""
        while not self._done():
            for event in self._membership.receive(self._wait_s()):
                self.take(event)
            self.expire()
            self.admit()
            self.compute()
            self.report()
            self._membership.turn(self.stats())
            self.check_when_idle()

    def take(self, event: object) -> None:
        """One event of the inbox."""
        match event:
            case ControlReceived(message):
                self._take_control(message)
            case DataReceived(peer, message):
                self._take_data(peer, message)
            case FrameWritten():
                self._num_kv_bytes += event.num_bytes
                self.intake.written(event, self._clock())
            case FrameDropped(key, reason):
                self._num_frames_dropped += 1
                limited.warning("frame", f"dropped a frame of {key.request_id}: {reason}")
            case SendFailed(peer, message) if peer == COORDINATOR:
                raise RuntimeError(f"could not tell the coordinator {type(message).__name__}")
            case SendFailed(peer, message):
                log.warning("could not send %s to %s", type(message).__name__, peer)
            case TerminationRequested():
                self._draining = True
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
        if not plan:
            return
        now = self._clock()
        for planned in plan:
            self._prompts.started(planned.sequence.request.key, now)
        results = compute(self._runner, plan)
        self._num_steps += 1
        self.scheduler.computed(plan)
        failed: dict[RequestKey, tuple[Request, str]] = {}
        for planned, result in zip(plan, results, strict=True):
            if isinstance(result, str):
                failed[planned.sequence.request.key] = (planned.sequence.request, result)
            else:
                self._answers.take(planned, result)
        for request, reason in failed.values():
            self._fail(request, "decode", reason)

    def report(self) -> None:
        """First tokens of prompts computed here, then all tokens of the step in one message."""
        for first in self._answers.first_tokens:
            self._channel.send_control(first)
        if self._answers.rows:
            tokens = m.Tokens(self._membership.epoch, tuple(self._answers.rows))
            self._channel.send_control(tokens)
        self._answers.first_tokens.clear()
        self._answers.rows.clear()

    def act(self, actions: list[i.Action]) -> None:
        """Carry actions of the intake out, in order."""
        for action in actions:
            match action:
                case i.Reply(peer, message):
                    self._channel.send_data(peer, message)
                case i.AcceptFrames(key, block_ids, num_tokens):
                    self._receiver.grant(TransferKey(*key), block_ids, num_tokens)
                case i.Drop(key):
                    self._receiver.revoke(TransferKey(*key))
                    self.blocks.cancel(key)
                case i.Begin(request, first_tokens, order):
                    self._receiver.revoke(TransferKey(*request.key))
                    blocks = self.blocks.commit(request.key)
                    self._answers.begin(request, blocks, order, first_tokens)
                case i.BeginLocal(request, block_ids, order):
                    self._answers.begin_local(request, block_ids, order)
                case i.Report(message):
                    self._prompts.forget(RequestKey(message.request_id, message.attempt))
                    self._channel.send_control(message)

    def stats(self) -> m.WorkerStats:
        counts = self.blocks.counts
        return m.WorkerStats(
            num_blocks_total=counts.total,
            num_blocks_free=counts.free,
            num_blocks_used=counts.used,
            num_blocks_reserved=counts.reserved,
            num_requests_running=self.scheduler.num_running,
            num_requests_waiting=self.intake.num_waiting + self.scheduler.num_preempted,
            num_transfers_in_flight=self.intake.num_granted,
            num_tokens_prefilled=self._answers.num_tokens_prefilled,
            num_tokens_decoded=self._answers.num_tokens_decoded,
            num_kv_bytes_received=self._num_kv_bytes,
            num_preemptions=self.scheduler.num_preemptions,
            num_frames_dropped=self._num_frames_dropped,
            num_steps=self._num_steps,
        )

    def check_when_idle(self) -> None:
        """Invariants that must hold when nothing is here."""
        if not self.scheduler.sequences and self.intake.idle:
            self.blocks.check()
            counts = self.blocks.counts
            assert counts.free == counts.total, "blocks are held by nobody"
            assert not self._prompts, "a prompt was not forgotten"

    def _take_control(self, message: m.ToWorker | m.ToLauncher) -> None:
        match message:
            case m.Prefill():
                self._open(Request.of(message, self._clock()), message, peer=None)
            case m.Release(request_id, attempt):
                self._release(RequestKey(request_id, attempt))
            case m.Drain(_, deadline_s):
                self._draining = True
                self._drain_due = self._clock() + deadline_s
            case _:
                log.warning("unexpected message %s", message)

    def _take_data(self, peer: str, message: m.PrefillToDecode | m.DecodeToPrefill) -> None:
        match message:
            case m.Open():
                self._open(Request.of(message, self._clock()), message, peer)
            case m.Commit():
                actions = self.intake.commit(message, self._clock())
                if actions is None:
                    self._acknowledge_abort(peer, message)
                else:
                    self.act(actions)
            case m.Abort(request_id, attempt):
                self._release(RequestKey(request_id, attempt))
                self._acknowledge_abort(peer, message)
            case _:
                log.warning("unexpected message %s", message)

    def _open(self, request: Request, message: m.Open | m.Prefill, peer: str | None) -> None:
        """A prompt joins the line, or hears why not."""
        refusal = self._refusal(request, message)
        if refusal is None:
            if peer is None:
                self._prompts.arrived(request.key, self._clock())
            self.intake.add(request, peer)
        elif peer is None:
            self._report_failure(request, "admission", *refusal)
        else:
            self.act([i.Reply(peer, m.Refuse(*request.key, request.epoch, *refusal))])

    def _refusal(self, request: Request, message: m.Open | m.Prefill) -> tuple[str, bool] | None:
        """Why a prompt can't be taken, and whether another worker might; None when it can."""
        addressee = (
            message.to_worker_id if isinstance(message, m.Open) else self._membership.worker_id
        )
        layout = message.layout if isinstance(message, m.Open) else self._runner.layout
        if (addressee, message.epoch) != (self._membership.worker_id, self._membership.epoch):
            here = f"{self._membership.worker_id} of epoch {self._membership.epoch}"
            return f"meant for {addressee} of epoch {message.epoch}, this is {here}", True
        if layout != self._runner.layout:
            return f"KV layout is {layout} there and {self._runner.layout} here", False
        if self._draining:
            return f"decode worker {self._membership.worker_id} is draining", True
        if self._knows(request.key):
            return "this attempt is already here", False
        if reason := self._impossible(request):
            return reason, False
        return None

    def _impossible(self, request: Request) -> str | None:
        """Why the request could never be served here, by its numbers. Peers may send anything."""
        num_tokens = len(request.token_ids)
        choice_ids = [choice.choice_id for choice in request.choices]
        if not choice_ids or len(set(choice_ids)) != len(choice_ids):
            return f"choice ids {choice_ids[:10]} are none, or not distinct"
        if not 0 < request.num_prompt_tokens <= num_tokens < self._runner.max_model_len:
            return f"{num_tokens} tokens do not fit in max_model_len {self._runner.max_model_len}"
        token_ids = [*request.token_ids, *(token_id for token_id, _ in request.sampling.logit_bias)]
        if min(token_ids) < 0 or max(token_ids) >= self._runner.vocab_size:
            return f"a token id is outside the vocabulary of {self._runner.vocab_size}"
        if self.intake.never_fits(request):
            return f"{num_tokens} tokens never fit in {self.blocks.counts.total} blocks"
        return None

    def _knows(self, key: RequestKey) -> bool:
        running = any(s.request.key == key for s in self.scheduler.sequences)
        return running or self.intake.knows(key)

    def _release(self, key: RequestKey) -> None:
        """Forget a request wherever it is."""
        self.act(self.intake.release(key))
        self.scheduler.release(key)
        self._prompts.forget(key)

    def _fail(self, request: Request, stage: m.Stage, reason: str, retriable: bool = True) -> None:
        self._release(request.key)
        self._report_failure(request, stage, reason, retriable)

    def _report_failure(
        self, request: Request, stage: m.Stage, reason: str, retriable: bool
    ) -> None:
        failed = m.Failed(*request.key, request.epoch, stage, reason, retriable)
        self._channel.send_control(failed)

    def _acknowledge_abort(self, peer: str, message: m.Commit | m.Abort) -> None:
        ack = m.AbortAck(message.request_id, message.attempt, message.epoch)
        self._channel.send_data(peer, ack)

    def _wait_s(self) -> float | None:
        if self._moved:
            return 0
        dues = [s.request.deadline for s in self.scheduler.sequences]
        due = min([*dues, self.intake.due() or float("inf"), self._drain_due])
        return None if due == float("inf") else max(0.0, due - self._clock())

    def _done(self) -> bool:
        idle = not self.scheduler.sequences and self.intake.idle
        return self._draining and (idle or self._clock() >= self._drain_due)
