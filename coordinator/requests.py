"""The life of requests. Pure: what clients and workers say in, actions out, the clock an argument.

waiting ─room─► at workers (tracked.Phase) ─all tokens─► Finish
   └────────────── cancelled, deadline, Failed, a death ──► Fail, Release to whoever has it
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from coordinator.dispatcher import Dispatcher
from coordinator.events import Action, ChoiceStopped, Deliver, Fail, Finish, NewRequest, Send
from coordinator.registry import Registry, Worker
from coordinator.tracked import Load, Tracked, loads_of
from coordinator.waiting import WaitingLine
from splitserve.errors import RequestFailedError, SplitserveError, UnavailableError
from splitserve.wire import messages as m

# A complete answer waits so long for the report on its transfer, if its client asked for timing.
TIMING_WAIT_S = 0.25
_STATUS_OF_STAGE = {"deadline": 504, "admission": 503}

log = logging.getLogger(__name__)


class Requests:
    """Owns every request that was accepted and has not ended."""

    def __init__(
        self,
        epoch: str,
        registry: Registry,
        dispatcher: Dispatcher,
        line: WaitingLine,
    ) -> None:
        self.line = line
        self.num_wasted_tokens = 0  # sampled for choices that had ended
        self._epoch = epoch
        self._registry = registry
        self._dispatcher = dispatcher
        self._tracked: dict[str, Tracked] = {}
        self._num_accepted = 0

    @property
    def num_in_flight(self) -> int:
        """Requests at workers."""
        return len(self._tracked) - len(self.line)

    @property
    def ids(self) -> list[str]:
        return list(self._tracked)

    def loads(self) -> dict[str, Load]:
        limits = self._registry.limits
        return loads_of(self._tracked.values(), limits.block_size) if limits else {}

    def due(self) -> float | None:
        """When `expire` has something to do."""
        return min((t.due() for t in self._tracked.values()), default=None)

    # -- clients ------------------------------------------------------------------------------

    def accept(self, requests: Sequence[NewRequest], now: float) -> None:
        """Put them in the line, all or none.

        Raises OverloadedError when there is no room in it, UnavailableError when nobody decodes.
        """
        if not self._registry.takers("decode"):
            raise UnavailableError("no decode worker is ready")
        self.line.check_room(len(requests))
        for request in requests:
            self._num_accepted += 1
            tracked = Tracked.of(request, self._num_accepted, now)
            self._tracked[request.request_id] = tracked
            self.line.add(tracked)

    def cancel(self, request_id: str) -> list[Action]:
        """Its client is gone: nobody is told but the workers."""
        tracked = self._tracked.get(request_id)
        return [] if tracked is None else self._end(tracked)

    def choice_stopped(self, stopped: ChoiceStopped, now: float) -> list[Action]:
        self.num_wasted_tokens += stopped.num_wasted
        tracked = self._tracked.get(stopped.request_id)
        if tracked is None:
            return []
        tracked.stopped.add(stopped.choice_id)
        return self._finish_if_complete(tracked, now)

    def fail(self, request_id: str, error: SplitserveError) -> list[Action]:
        tracked = self._tracked.get(request_id)
        return [] if tracked is None else [Fail(request_id, error), *self._end(tracked)]

    def expire(self, now: float) -> list[Action]:
        """End what is late; finish what has waited long enough for its timing."""
        actions: list[Action] = []
        for tracked in [t for t in self._tracked.values() if t.due() <= now]:
            request = tracked.request
            if tracked.linger_until is not None:
                actions += self._finish(tracked, now)
                continue
            where = "waiting for a worker" if not tracked.phases else "being served"
            error = RequestFailedError(
                f"the request took longer than {request.timeout_s:g} s, it was {where}",
                stage="deadline",
                status=504,
            )
            actions += self.fail(request.request_id, error)
        return actions

    # -- workers ------------------------------------------------------------------------------

    def first_token(self, worker: Worker, message: m.FirstToken, now: float) -> list[Action]:
        """A prompt is computed."""
        tracked = self._find(worker, message)
        if tracked is None:
            return [self._release_order(worker, message.request_id, message.attempt)]
        tracked.timeline.worker_queue_s = message.queued_s
        tracked.timeline.prefill_s = message.prefill_s
        local = tracked.timeline.decode_worker_id == worker.worker_id
        if tracked.phases.get(worker.worker_id) == "prefilling":
            tracked.phases[worker.worker_id] = "decoding" if local else "transferring"
        actions: list[Action] = []
        for row in message.rows:
            actions += self._take_row(tracked, row, now)
        return [*actions, *self._finish_if_complete(tracked, now)]

    def handed_over(self, worker: Worker, message: m.HandedOver, now: float) -> list[Action]:
        """The prefill worker is done. About an ended request it is the answer to its Release."""
        tracked = self._find(worker, message)
        if tracked is None:
            return []
        tracked.phases.pop(worker.worker_id, None)
        tracked.timeline.transfer_s = message.transfer_s
        tracked.timeline.num_kv_bytes = message.num_kv_bytes
        return self._finish_if_complete(tracked, now)

    def tokens(self, worker: Worker, message: m.Tokens, now: float) -> list[Action]:
        """A decode step's tokens."""
        actions: list[Action] = []
        unknown: dict[tuple[str, int], None] = {}  # each once, in order
        touched: dict[str, Tracked] = {}
        for row in message.rows:
            tracked = self._find(worker, row)
            if tracked is None or tracked.timeline.decode_worker_id != worker.worker_id:
                self.num_wasted_tokens += len(row.tokens)
                unknown[row.request_id, row.attempt] = None
                continue
            tracked.phases[worker.worker_id] = "decoding"
            touched[row.request_id] = tracked
            actions += self._take_row(tracked, row, now)
        for tracked in touched.values():
            actions += self._finish_if_complete(tracked, now)
        releases = [self._release_order(worker, *key) for key in unknown]
        return [*actions, *releases]

    def failed(self, worker: Worker, message: m.Failed, now: float) -> list[Action]:
        """A worker gave a request up. About an ended one it is the answer to its Release."""
        tracked = self._find(worker, message)
        if tracked is None:
            return []
        phase = tracked.phases.pop(worker.worker_id, None)
        if tracked.complete:
            return self._finish(tracked, now)
        if phase == "transferring" and "decoding" in tracked.phases.values():
            return []  # the decode worker has all it needs
        if message.stage == "admission" and message.retriable:
            self._registry.refused(worker, tracked.timeline.decode_worker_id, message.reason)
            if tracked.can_restart:
                return self._restart(tracked)
        status = _STATUS_OF_STAGE.get(message.stage, 500)
        reason = f"{worker.worker_id} failed in stage {message.stage}: {message.reason}"
        error = RequestFailedError(reason, stage=message.stage, status=status)
        return self.fail(message.request_id, error)

    def not_sent(self, prefill: m.Prefill) -> list[Action]:
        """The order that starts a request reached nobody: its worker has gone."""
        tracked = self._tracked.get(prefill.request_id)
        if tracked is None or tracked.attempt != prefill.attempt or not tracked.can_restart:
            return []
        tracked.phases.pop(tracked.timeline.prefill_worker_id or "", None)
        return self._restart(tracked)

    def left_behind(self, worker: Worker) -> list[Action]:
        """A worker exited as it should: what it had not begun never reached it."""
        actions: list[Action] = []
        for tracked in [t for t in self._tracked.values() if t.can_restart]:
            if tracked.phases.get(worker.worker_id) in ("prefilling", "awaiting"):
                del tracked.phases[worker.worker_id]
                actions += self._restart(tracked)
        return actions

    def _restart(self, tracked: Tracked) -> list[Action]:
        """Back into the line; its age puts it before all that came later."""
        releases = self._releases(tracked)
        tracked.restart()
        self.line.add(tracked)
        return releases

    def worker_died(self, worker: Worker, reason: str, now: float) -> list[Action]:
        """Everything the worker held is lost."""
        self._dispatcher.forget(worker.worker_id)
        actions: list[Action] = []
        for tracked in [t for t in self._tracked.values() if worker.worker_id in t.phases]:
            phase = tracked.phases.pop(worker.worker_id)
            if tracked.complete:
                actions += self._finish(tracked, now)
                continue
            if phase == "transferring" and "decoding" in tracked.phases.values():
                continue  # the decode worker has all it needs
            stage: m.Stage = "prefill" if phase == "prefilling" else "decode"
            stage = "transfer" if phase == "transferring" else stage
            text = f"{worker.role} worker {worker.worker_id} died: {reason}"
            error = RequestFailedError(text, stage=stage, status=503)
            actions += self.fail(tracked.request.request_id, error)
        return actions

    # -- routing ------------------------------------------------------------------------------

    def dispatch(self, now: float) -> list[Action]:
        """Send waiting requests to workers with room, in order; nobody passes the first."""
        actions: list[Action] = []
        while (tracked := self.line.first()) is not None:
            if not self._registry.takers("decode"):
                error = UnavailableError("no decode worker is left")
                actions += self.fail(tracked.request.request_id, error)
                continue
            send = self._dispatcher.place(tracked, self.loads(), now)
            if send is None:
                break
            self.line.remove(tracked.request.request_id)
            actions.append(send)
        return actions

    # -- the end ------------------------------------------------------------------------------

    def _find(
        self, worker: Worker, message: m.FirstToken | m.HandedOver | m.Failed | m.TokenRow
    ) -> Tracked | None:
        """The request a worker speaks of, if this attempt of it was given to that worker."""
        tracked = self._tracked.get(message.request_id)
        if tracked is None or tracked.attempt != message.attempt:
            return None
        timeline = tracked.timeline
        given_to = (timeline.prefill_worker_id, timeline.decode_worker_id)
        return tracked if worker.worker_id in given_to else None

    def _take_row(self, tracked: Tracked, row: m.TokenRow, now: float) -> list[Action]:
        order = tracked.choices.get(row.choice_id)
        if order is None:
            log.warning("a row for choice %d, which nobody asked for", row.choice_id)
            return []
        tokens, finish = order.take(row)
        if tracked.all_sampled:
            assert tracked.timeline.decode_worker_id is not None
            tracked.phases.pop(tracked.timeline.decode_worker_id, None)
        if row.choice_id in tracked.stopped:
            self.num_wasted_tokens += len(tokens)
            return []
        if not tokens and finish is None:
            return []
        if len(tracked.choices) == 1:
            tracked.delivered += [token.token_id for token in tokens]
        tracked.timeline.tokens_delivered(order.num_delivered - 1, now)
        return [Deliver(tracked.request.request_id, row.choice_id, tokens, finish)]

    def _finish_if_complete(self, tracked: Tracked, now: float) -> list[Action]:
        if not tracked.complete:
            return []
        timeline = tracked.timeline
        transferring = tracked.phases.get(timeline.prefill_worker_id or "") == "transferring"
        if tracked.request.wants_timing and transferring:
            if tracked.linger_until is None:
                tracked.linger_until = min(tracked.deadline, now + TIMING_WAIT_S)
            return []
        return self._finish(tracked, now)

    def _finish(self, tracked: Tracked, now: float) -> list[Action]:
        tracked.timeline.finished_at = now
        return [Finish(tracked.request.request_id, tracked.timeline), *self._end(tracked)]

    def _end(self, tracked: Tracked) -> list[Action]:
        """Forget a request, here and at every worker that still has it."""
        request_id = tracked.request.request_id
        del self._tracked[request_id]
        self.line.remove(request_id)
        return self._releases(tracked)

    def _releases(self, tracked: Tracked) -> list[Action]:
        alive = {w.worker_id: w for w in self._registry.alive()}
        return [
            self._release_order(alive[worker_id], tracked.request.request_id, tracked.attempt)
            for worker_id in tracked.phases
            if worker_id in alive
        ]

    def _release_order(self, worker: Worker, request_id: str, attempt: int) -> Send:
        return Send(worker.identity, m.Release(request_id, attempt, self._epoch))
