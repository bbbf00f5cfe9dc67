"""The life of requests. Pure: what clients and workers say in, actions out, the clock an argument.

waiting ─room─► at workers (tracked.Phase) ─all tokens─► Finish
   ▲  └────────────── cancelled, deadline, too many failures ► Fail, Release to whoever has it
   └── a worker died, refused, failed: the next attempt, behind what was delivered
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator import failures
from coordinator.delivery import begun_of, take_row
from coordinator.dispatcher import Dispatcher
from coordinator.events import Action, ChoiceStopped, Fail, Finish, NewRequest
from coordinator.legs import Legs
from coordinator.registry import Registry, Worker
from coordinator.tracked import MAX_FAILURES, Leg, Tracked
from coordinator.waiting import WaitingLine
from splitserve.errors import SplitserveError, UnavailableError
from splitserve.wire import messages as m

# The end of an answer waits so long for the report on its transfer, if its client asked for timing:
# a prefill worker that is in a step tells it behind that step.
TIMING_WAIT_S = 2.0


class Requests:
    """Owns every request that was accepted and has not ended, and its legs."""

    def __init__(
        self,
        epoch: str,
        registry: Registry,
        dispatcher: Dispatcher,
        line: WaitingLine,
        somebody_decodes: Callable[[], bool],
    ) -> None:
        """`somebody_decodes`, now or soon: else nobody waits for it."""
        self.line = line
        self.legs = Legs(epoch, registry, dispatcher, line)
        self.num_wasted_tokens = 0  # sampled for choices that had ended
        self.num_restarts = 0  # attempts that went on for one that was lost
        self._registry = registry
        self._dispatcher = dispatcher
        self._somebody_decodes = somebody_decodes
        self._tracked: dict[str, Tracked] = {}
        self._num_accepted = 0

    @property
    def ids(self) -> list[str]:
        return list(self._tracked)

    def due(self) -> float | None:
        """When `expire` has something to do."""
        return min((t.due() for t in self._tracked.values()), default=None)

    # -- clients ------------------------------------------------------------------------------

    def accept(self, requests: Sequence[NewRequest], now: float) -> None:
        """Put them in the line, all or none.

        Raises OverloadedError when there is no room in it, UnavailableError when nobody decodes.
        """
        if not self._somebody_decodes():
            raise UnavailableError("no decode worker is ready")
        self.line.check_room(len(requests))
        for request in requests:
            self._num_accepted += 1
            tracked = Tracked.of(request, self._num_accepted, now)
            self._tracked[request.request_id] = tracked
            for leg in tracked.legs:
                self.legs.add(leg)

    def cancel(self, request_id: str, now: float) -> list[Action]:
        """Its client is gone: nobody is told but the workers."""
        tracked = self._tracked.get(request_id)
        return [] if tracked is None else self._end(tracked, now)

    def choice_stopped(self, stopped: ChoiceStopped, now: float) -> list[Action]:
        self.num_wasted_tokens += stopped.num_wasted
        tracked = self._tracked.get(stopped.request_id)
        if tracked is None:
            return []
        tracked.stopped.add(stopped.choice_id)
        return self._finish_if_complete(tracked, now)

    def fail(self, request_id: str, error: SplitserveError, now: float) -> list[Action]:
        tracked = self._tracked.get(request_id)
        return [] if tracked is None else [Fail(request_id, error), *self._end(tracked, now)]

    def expire(self, now: float) -> list[Action]:
        """End what is late; finish what has waited long enough for its timing."""
        actions: list[Action] = []
        for tracked in [t for t in self._tracked.values() if t.due() <= now]:
            if tracked.linger_until is not None:
                actions += self._finish(tracked, now)
                continue
            actions += self.fail(tracked.request.request_id, failures.too_late(tracked), now)
        return actions

    # -- workers ------------------------------------------------------------------------------

    def first_token(self, worker: Worker, message: m.FirstToken, now: float) -> list[Action]:
        """A prompt is computed."""
        leg = self.legs.find(worker, message)
        if leg is None:
            return [self.legs.forget_order(worker, message.request_id, message.attempt)]
        leg.tracked.computed(message.num_cached)
        timeline = leg.tracked.timeline
        timeline.prompt_computed(leg.attempt, message.queued_s, message.prefill_s)
        if leg.phases.get(worker.worker_id) == "prefilling":
            local = leg.decode_worker_id == worker.worker_id
            leg.phases[worker.worker_id] = "decoding" if local else "transferring"
        actions: list[Action] = []
        for row in message.rows:
            actions += self._take_row(leg, row, now)
        return [*actions, *self._finish_if_complete(leg.tracked, now)]

    def handed_over(self, worker: Worker, message: m.HandedOver, now: float) -> list[Action]:
        """The prefill worker is done."""
        leg = self.legs.find(worker, message)
        if leg is None:
            return []
        leg.phases.pop(worker.worker_id, None)
        timeline = leg.tracked.timeline
        timeline.handed_over(leg.attempt, message.num_kv_bytes, message.times)
        return self._finish_if_complete(leg.tracked, now)

    def tokens(self, worker: Worker, message: m.Tokens, now: float) -> list[Action]:
        """A decode step's tokens."""
        actions: list[Action] = []
        unknown: dict[tuple[str, int], None] = {}  # each once, in order
        touched: dict[str, Tracked] = {}
        for begun in begun_of(message):
            if leg := self.legs.find(worker, begun):
                leg.tracked.timeline.decode_began(leg.attempt, begun)
        for row in message.rows:
            leg = self.legs.find(worker, row)
            if leg is None or leg.decode_worker_id != worker.worker_id:
                self.num_wasted_tokens += len(row.tokens)
                unknown[row.request_id, row.attempt] = None
                continue
            leg.phases[worker.worker_id] = "decoding"
            touched[leg.request_id] = leg.tracked
            actions += self._take_row(leg, row, now)
        for tracked in touched.values():
            actions += self._finish_if_complete(tracked, now)
        return [*actions, *(self.legs.forget_order(worker, *key) for key in unknown)]

    def failed(self, worker: Worker, message: m.Failed, now: float) -> list[Action]:
        """A worker gave a leg up."""
        leg = self.legs.find(worker, message)
        if leg is None:
            # A kept one waits for a Release, which may have crossed this.
            order = self.legs.forget_order(worker, message.request_id, message.attempt)
            return [order] if message.kept else []
        if not message.kept:
            leg.phases.pop(worker.worker_id, None)
        if leg.is_decoding and leg.decode_worker_id != worker.worker_id:
            return self.legs.leave(leg, worker, now)  # the decode worker has all it needs
        if leg.tracked.complete:
            return self._finish(leg.tracked, now)
        if not message.retriable:
            return self.fail(leg.request_id, failures.reported(worker, message), now)
        return self._set_back(leg, worker, message, now)

    def _set_back(self, leg: Leg, worker: Worker, message: m.Failed, now: float) -> list[Action]:
        """An attempt has failed, and another may do better."""
        error = failures.reported(worker, message)
        at_decoder = message.kept or worker.worker_id == leg.decode_worker_id
        culprit = leg.decode_worker_id if at_decoder else worker.worker_id
        if leg.retarget_came_late(worker.worker_id, message):
            return self._go_on(leg, None, error, now, is_failure=False)
        if message.stage == "admission" and culprit is not None:
            return self._refused(leg, culprit, error, now)
        hasty = message.kept and self._dispatcher.decoder_is_in_a_step(leg)
        if hasty:
            leg.patience *= 2
        return self._go_on(leg, culprit, error, now, is_failure=not hasty)

    def worker_died(self, worker: Worker, reason: str, now: float) -> list[Action]:
        """Everything the worker held is lost."""
        self._dispatcher.forget(worker.worker_id)
        actions: list[Action] = []
        for leg in self.legs.at(worker):
            actions += self._lose(leg, worker, failures.died(worker, leg, reason), now)
        return actions

    def _lose(
        self, leg: Leg, worker: Worker, error: SplitserveError, now: float, is_failure: bool = True
    ) -> list[Action]:
        """What one worker has of a leg is lost, or has to be elsewhere."""
        if not self.legs.lives(leg):
            return []  # its request has ended with another leg
        if leg.tracked.complete:
            return self._finish(leg.tracked, now)
        released = self.legs.leave(leg, worker, now)
        if leg.is_decoding and worker.worker_id != leg.decode_worker_id:
            return released  # all is handed over
        return [*released, *self._go_on(leg, worker.worker_id, error, now, is_failure)]

    def not_sent(self, worker: Worker, message: object, now: float) -> list[Action]:
        """A worker's message queue is full. A Release is sent again when it speaks of its leg."""
        if not isinstance(message, m.Prefill | m.Retarget):
            return []
        error = failures.queue_full(worker)
        actions: list[Action] = []
        for leg in self.legs.at(worker):
            if leg.leg_id == message.request_id and leg.attempt == message.attempt:
                actions += self._refused(leg, worker.worker_id, error, now)
        return actions

    def move_away(self, worker: Worker, now: float) -> list[Action]:
        """A draining worker has had its time: what it still has goes on elsewhere."""
        error = failures.stopped(worker)
        actions: list[Action] = []
        for leg in self.legs.at(worker):
            actions += self._lose(leg, worker, error, now, is_failure=False)
        return actions

    # -- routing ------------------------------------------------------------------------------

    def dispatch(self, now: float) -> list[Action]:
        """Send waiting legs to workers with room, in order; nobody passes the first."""
        actions: list[Action] = []
        while (leg := self.line.first()) is not None:
            if not self._somebody_decodes():
                actions += self.fail(leg.request_id, failures.nobody_left(leg), now)
                continue
            send = self.legs.place_next(now)
            if send is None:
                break
            actions.append(send)
        return actions

    def _refused(
        self, leg: Leg, refuser_id: str, error: SplitserveError, now: float
    ) -> list[Action]:
        """A worker does not take a leg. It is asked again, but not before its next heartbeat.

        Its first refusal is no failure: it may be leaving. Later ones are, so that this ends.
        """
        if refuser := self._registry.workers.get(refuser_id):
            refuser.refuses = True
        return self._go_on(leg, refuser_id, error, now, is_failure=refuser_id in leg.failed_at)

    def _go_on(
        self,
        leg: Leg,
        culprit: str | None,
        error: SplitserveError,
        now: float,
        is_failure: bool = True,
    ) -> list[Action]:
        """The next attempt, elsewhere if that can be; after too many failures, the error."""
        leg.num_failures += is_failure
        if leg.num_failures >= MAX_FAILURES:
            return self.fail(leg.request_id, error, now)
        if culprit is not None:
            leg.failed_at.add(culprit)
        leg.lost_to = str(error)
        self.num_restarts += 1
        return self.legs.retarget(leg, now) or self.legs.restart(leg, now)

    # -- the end ------------------------------------------------------------------------------

    def _take_row(self, leg: Leg, row: m.TokenRow, now: float) -> list[Action]:
        taken = take_row(leg, row, now)
        self.num_wasted_tokens += taken.num_wasted
        return [] if taken.delivery is None else [taken.delivery]

    def _finish_if_complete(self, tracked: Tracked, now: float) -> list[Action]:
        if not tracked.complete:
            done = [leg for leg in tracked.legs if not leg.open_choices]
            return [action for leg in done for action in self.legs.drop(leg, now)]
        tracked.timeline.finished(now)
        if tracked.request.wants_timing and tracked.transferring:
            if tracked.linger_until is None:
                tracked.linger_until = min(tracked.deadline, now + TIMING_WAIT_S)
            return [action for leg in tracked.legs for action in self.legs.stop_decoding(leg, now)]
        return self._finish(tracked, now)

    def _finish(self, tracked: Tracked, now: float) -> list[Action]:
        tracked.timeline.finished(now)
        request_id, num_cached = tracked.request.request_id, tracked.num_cached_tokens or 0
        finish = Finish(request_id, tracked.timeline, num_cached)
        return [finish, *self._end(tracked, now)]

    def _end(self, tracked: Tracked, now: float) -> list[Action]:
        """Forget a request, here and at every worker that still has it."""
        del self._tracked[tracked.request.request_id]
        return [action for leg in list(tracked.legs) for action in self.legs.drop(leg, now)]
