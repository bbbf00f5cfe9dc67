"""Sends a request to the workers that have room for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.events import NewRequest, Send
from coordinator.registry import Registry, Worker
from coordinator.router import Router
from coordinator.tracked import Load, Tracked
from coordinator.windows import has_room_for_both, has_room_to_decode, has_room_to_prefill
from splitserve.wire import messages as m


class Dispatcher:
    """Owns the choice of a (prefill, decode) pair.

    With no prefill worker alive, or none wanted, the decode worker computes the prompt itself.
    """

    def __init__(
        self, epoch: str, registry: Registry, router: Router, stall_timeout_s: float
    ) -> None:
        self.num_local_prefills = 0
        self._epoch = epoch
        self._registry = registry
        self._router = router
        self._stall_timeout_s = stall_timeout_s

    def place(self, tracked: Tracked, loads: Mapping[str, Load], now: float) -> Send | None:
        """The order that starts a request, or None while nobody has room for it."""
        pair = self._choose(tracked.request, loads)
        return None if pair is None else self._start(tracked, *pair, now)

    def forget(self, worker_id: str) -> None:
        self._router.forget(worker_id)

    def _choose(
        self, request: NewRequest, loads: Mapping[str, Load]
    ) -> tuple[Worker | None, Worker] | None:
        prefill = self._registry.takers("prefill")
        has_room = has_room_to_decode if prefill else has_room_for_both
        decoders = [
            w
            for w in self._registry.takers("decode")
            if has_room(w.facts, loads.get(w.worker_id, Load()), request)
        ]
        prefillers = [
            w
            for w in prefill
            if has_room_to_prefill(w.facts, loads.get(w.worker_id, Load()), request)
        ]
        if not decoders or (prefill and not prefillers):
            return None
        decoder = self._router.choose(decoders, loads)
        assert decoder is not None
        return self._router.choose(prefillers, loads), decoder

    def _start(
        self, tracked: Tracked, prefiller: Worker | None, decoder: Worker, now: float
    ) -> Send:
        first = prefiller or decoder
        tracked.phases[decoder.worker_id] = "awaiting"
        tracked.phases[first.worker_id] = "prefilling"
        self.num_local_prefills += prefiller is None
        timeline = tracked.timeline
        timeline.dispatched_at = now
        timeline.prefill_worker_id = first.worker_id
        timeline.decode_worker_id = decoder.worker_id
        request = tracked.request
        message = m.Prefill(
            request.request_id,
            tracked.attempt,
            self._epoch,
            (*request.token_ids, *tracked.delivered),
            len(request.token_ids),
            request.choices,
            request.sampling,
            deadline_s=tracked.deadline - now,
            stall_timeout_s=self._stall_timeout_s,
            decode_worker_id=decoder.worker_id if prefiller else None,
            decode_endpoint=decoder.endpoint if prefiller else None,
        )
        return Send(first.identity, message)
