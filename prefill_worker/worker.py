"""The prefill worker: computes prompts and ships their KV."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kv_transfer.base import KVSender
from kv_transfer.chunks import MAX_FRAME_BYTES
from prefill_worker.attribution import Account
from prefill_worker.handoff import (
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
from prefill_worker.refusals import refusal
from prefill_worker.scheduler import PrefillScheduler
from splitserve.draining import Draining
from splitserve.engine.step import compute
from splitserve.membership import (
    CoordinatorLost,
    EpochChanged,
    Membership,
    TerminationRequested,
)
from splitserve.profiling.observer import Observer
from splitserve.profiling.recorder import Recorder
from splitserve.request import SampledToken
from splitserve.scheduling.block_manager import BlockManager
from splitserve.scheduling.chunking import Planned
from splitserve.scheduling.prefix_cache import PrefixCache
from splitserve.scheduling.prompt_clock import PromptClock
from splitserve.scheduling.sequence import Request, RequestKey, first_rows
from splitserve.wire import messages as m
from splitserve.wire.channel import (
    COORDINATOR,
    Channel,
    ChannelFailed,
    ControlReceived,
    DataReceived,
    FirstTokenSent,
    RoomAvailable,
    SendFailed,
)

if TYPE_CHECKING:  # the loop itself needs no torch
    from splitserve.engine.model_runner import ModelRunner

Order = m.Retarget | m.Release | m.PeerGone | m.Drain | m.Observe | m.ResetPrefixCache

log = logging.getLogger(__name__)


class PrefillWorker:
    """Owns the loop of one prefill process."""

    def __init__(
        self,
        runner: ModelRunner,
        channel: Channel,
        sender: KVSender,
        membership: Membership,
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.blocks = BlockManager(runner.num_blocks)
        block_size, budget = runner.layout.block_size, runner.max_num_batched_tokens
        cache = PrefixCache(self.blocks, block_size, runner.config.enable_prefix_caching)
        self.scheduler = PrefillScheduler(self.blocks, block_size, budget, cache)
        self.handoffs = Handoffs(membership.worker_id, runner.layout, MAX_FRAME_BYTES)
        self._runner = runner
        self._channel = channel
        self._sender = sender
        self._membership = membership
        self._recorder = recorder
        self._observer = Observer(membership.worker_id, recorder, runner)
        self._clock = clock
        self._prompts = PromptClock()
        self._draining = Draining(membership.drain_grace_s)
        self._account = Account(self.scheduler, self.handoffs, runner.max_num_batched_tokens)

    def run(self) -> None:
        """Until drained: take what came, compute one step, push KV, admit.

        Admission comes last: before the loop waits, whoever can start has started.
        """
        lap = self._recorder.lap
        while not self._done():
            wait_s, waiting = self._wait_s(), self._account.waits_for
            events = self._membership.receive(wait_s)
            lap("receive" if wait_s == 0 else waiting)
            for event in events:
                self.take(event)
            lap("receive")
            self.expire()
            self.compute()
            lap("send")
            for event in self._membership.receive(0):
                self.take(event)  # Grants that came during the step: their KV can go now
            lap("receive")
            self.push()
            lap("send")
            self.admit()
            lap("schedule")
            self._recorder.turned()
            self._membership.turn(self.stats())
            self.check_when_idle()
            for report in self._observer.turned(self._clock()):
                self._channel.send_control(report)
            lap("other")

    def take(self, event: object) -> None:
        """One event of the inbox."""
        now = self._clock()
        match event:
            case ControlReceived(message, at):
                self._take_control(message, now, at)
            case DataReceived(peer, message, at):
                self.act(self.handoffs.handle(peer, message, now, at))
            case SendFailed(peer, message):
                self._send_failed(peer, message)
            case TerminationRequested():
                self._draining.signalled(now)
                self._membership.start_draining()
            case EpochChanged(epoch) if epoch != self._membership.epoch:
                self._membership.rejoin(tuple(m.Held(*key) for key in self.handoffs.keys))
            case EpochChanged() | CoordinatorLost():
                pass  # the loop turns, and leaves if it drains
            case ChannelFailed(reason):
                raise RuntimeError(f"the I/O thread ended: {reason}")
            case RoomAvailable(peer):
                self.handoffs.moved(peer, now)  # the loop turns, and push looks at the room
            case FirstTokenSent(first, at):
                self.handoffs.first_token_sent(first, at)
            case _:
                log.warning("unexpected event %s", event)

    def expire(self) -> None:
        """Give up what is late."""
        self.act(self.handoffs.expire(self._clock()))

    def admit(self) -> None:
        """Prompts that now hold their blocks are announced to their decode workers."""
        for sequence in self.scheduler.admit():
            self._account.began(sequence)
            key, num_cached = sequence.request.key, sequence.num_cached
            self.act(self.handoffs.open(key, self._membership.epoch, self._clock(), num_cached))

    def compute(self) -> None:
        """One forward pass over the next chunks."""
        plan = self.scheduler.schedule()
        self._recorder.lap("schedule")
        if not plan:
            return
        now = self._clock()
        for chunk in plan:
            self._prompts.started(chunk.sequence.request.key, now)
        self.act(self.handoffs.before_step(now))
        self._recorder.lap("send")
        results = compute(self._runner, plan)
        self._recorder.stepped(self._account.step_of(plan), self._runner.take_spent())
        self._account.num_steps += 1
        for planned, result in zip(plan, results, strict=True):
            if isinstance(result, str):
                self.act(self.handoffs.fail(planned.sequence.request.key, "prefill", result))
            else:
                self._computed(planned, result)

    def push(self) -> None:
        """Send what is computed, granted, and fits in the transport's room."""
        while actions := self.handoffs.pump(self._sender.room_bytes):
            self.act(actions)  # room may have come back meanwhile, and nobody would say so
        self.act(self.handoffs.before_wait(self._clock()))

    def act(self, actions: list[Action]) -> None:
        """Carry actions of the hand-off out."""
        for action in actions:
            match action:
                case Send(peer, message):
                    self._channel.send_data(peer, message)
                case SendFrame(peer, key, epoch, region):
                    header = m.FrameHeader(*key, epoch=epoch, region=region, checksum=0)
                    block_ids = self.scheduler.block_ids(key.request_id)
                    self._account.num_kv_bytes += self._sender.send(peer, header, block_ids)
                    self.handoffs.sent(key, self._clock())
                case Finish(key, report):
                    self.scheduler.release(key.request_id)
                    self._prompts.forget(key)
                    if report is not None:
                        self._channel.send_control(report)
                case Report(message):
                    self._channel.send_control(message)
                case Rekey(old, request):
                    self.scheduler.rekey(request)
                    self._prompts.rename(old, request.key)
                case Disconnect(peer):
                    self._channel.disconnect(peer)

    def stats(self) -> m.WorkerStats:
        return self._account.stats(self._recorder.evidence)

    def check_when_idle(self) -> None:
        """Invariants that must hold when nothing is here."""
        if self.scheduler.idle:
            self.blocks.check()
            assert self.blocks.counts.used == 0, "blocks are held by nobody"
            assert not (self._prompts or self.handoffs), "a prompt was not forgotten"

    def _take_control(self, message: m.ToWorker | m.ToLauncher, now: float, at: float) -> None:
        match message:
            case m.Welcome(_, keep):
                if self._membership.welcomed(message):
                    kept = {RequestKey(held.request_id, held.attempt) for held in keep}
                    self.act(self.handoffs.keep_only(kept))
            case m.Prefill():
                self._submit(message, at)
            case _ if isinstance(message, Order):
                if message.epoch == self._membership.epoch:
                    self._obey(message, now)
            case _:
                log.warning("unexpected message %s", message)

    def _obey(self, message: Order, now: float) -> None:
        """What the coordinator of this epoch says of what is here."""
        match message:
            case m.Retarget():
                self.act(self.handoffs.retarget(message, self._membership.epoch, now))
            case m.Release(request_id, attempt):
                self.act(self.handoffs.release(RequestKey(request_id, attempt)))
            case m.PeerGone(worker_id):
                self.act(self.handoffs.peer_gone(worker_id))
            case m.Drain(_, deadline_s):
                self._draining.told(deadline_s, now)
                self._membership.start_draining()
            case m.Observe():
                self._observer.begin(message, now)
            case m.ResetPrefixCache():
                self.scheduler.cache.clear()

    def _submit(self, message: m.Prefill, at: float) -> None:
        request = Request.of(message, at)
        held = self.handoffs.attempt_of(message.request_id)
        if held is not None and held >= message.attempt:
            log.warning("dropped Prefill %s: attempt %d is here", request.key, held)
            return
        self.act(self.handoffs.release(request.key))  # an older attempt
        here = self._membership, self._draining, self.scheduler, self._runner
        if (why := refusal(request, message, *here)) is not None:
            self._channel.send_control(m.Failed(*request.key, request.epoch, "admission", *why))
            return
        assert message.decode_worker_id is not None and message.decode_endpoint is not None
        self._prompts.arrived(request.key, at)
        self.handoffs.add(request, Target(message.decode_worker_id, message.decode_endpoint), at)
        self.scheduler.submit(request)

    def _computed(self, planned: Planned, tokens: tuple[SampledToken, ...]) -> None:
        self.scheduler.computed([planned])
        self._account.num_tokens += planned.num_tokens
        self.handoffs.computed(planned.sequence.request.key, planned.end)
        if planned.samples:
            self._first_tokens(planned, tokens)

    def _first_tokens(self, planned: Planned, tokens: tuple[SampledToken, ...]) -> None:
        """Report the first token of each choice at once; its KV follows."""
        now = self._clock()
        request, num_cached = planned.sequence.request, planned.sequence.num_cached
        rows = first_rows(planned.sequence, tokens)
        times = self._prompts.finish(request.key, now)
        first = m.FirstToken(*request.key, request.epoch, rows, *times, num_cached)
        self._channel.send_control(first)
        unfinished = [row for row in rows if row.finish is None]
        self.act(self.handoffs.prompt_finished(request.key, unfinished, now))

    def _send_failed(self, peer: str, message: object) -> None:
        if peer == COORDINATOR:
            if self._membership.connected:
                raise RuntimeError(f"could not tell the coordinator {type(message).__name__}")
            return  # the next one asks what is here
        log.warning("could not send %s to %s", type(message).__name__, peer)
        if isinstance(message, m.Open | m.FrameHeader | m.Computing | m.Computed | m.Commit):
            key = RequestKey(message.request_id, message.attempt)
            self.act(self.handoffs.send_failed(key, f"the decode worker at {peer} is unreachable"))

    def _wait_s(self) -> float | None:
        if self.scheduler.num_computing:
            return 0
        dues = self._draining.due, self._recorder.due(self._account.waits_for), self._observer.due()
        due = min(self.handoffs.due() or float("inf"), *dues)
        return None if due == float("inf") else max(0.0, due - self._clock())

    def _done(self) -> bool:
        return self._draining.over(self.scheduler.idle, self._membership.connected, self._clock())
