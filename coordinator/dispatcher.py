"""Sends legs of requests to the workers that have room for them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from coordinator.events import Send
from coordinator.registry import Registry, Worker
from coordinator.router import Router
from coordinator.tracked import Leg, Load
from coordinator.windows import has_room_for_both, has_room_to_decode, has_room_to_prefill
from splitserve.wire import messages as m
from splitserve.wire.messages import WorkerFacts


class Dispatcher:
    """Owns the choice of a (prefill, decode) pair.

    With no prefill worker alive, or none wanted, the decode worker computes the prompt itself; so
    it does with one that has grown, by what was delivered, beyond what prefill workers take.
    """

    def __init__(
        self, epoch: str, registry: Registry, router: Router, stall_timeout_s: float
    ) -> None:
        self.num_local_prefills = 0
        self._epoch = epoch
        self._registry = registry
        self._router = router
        self._stall_timeout_s = stall_timeout_s

    def place(self, leg: Leg, loads: Mapping[str, Load], now: float) -> Send | None:
        """The order that starts a leg, or None while nobody has room for it."""
        prefill = self._prefillers(leg)
        has_room = has_room_to_decode if prefill else has_room_for_both
        decoders = _with_room(self._registry.takers("decode"), has_room, leg, loads)
        prefillers = _with_room(prefill, has_room_to_prefill, leg, loads)
        decoder = self._choose(leg, decoders, loads)
        if decoder is None or (prefill and not prefillers):
            return None
        return self._start(leg, self._choose(leg, prefillers, loads), decoder, now)

    def other_decoder(self, leg: Leg, loads: Mapping[str, Load]) -> Worker | None:
        """Another decode worker with room for a prompt whose KV is kept; None: none has."""
        takers = self._registry.takers("decode")
        others = [w for w in takers if w.worker_id != leg.decode_worker_id]
        decoders = _with_room(others, has_room_to_decode, leg, loads)
        return self._choose(leg, decoders, loads)

    def decoder_is_in_a_step(self, leg: Leg) -> bool:
        """Whether a hand-off stalled because its decode worker has not looked up for so long.

        With its patience doubled each time this ends: a step that lasts too long is a death.
        """
        decoder = self._registry.workers.get(leg.decode_worker_id or "")
        return decoder is not None and decoder.loop_age_s >= self._patience_s(leg) / 2

    def forget(self, worker_id: str) -> None:
        self._router.forget(worker_id)

    def _patience_s(self, leg: Leg) -> float:
        return self._stall_timeout_s * leg.patience

    def _prefillers(self, leg: Leg) -> list[Worker]:
        limits = self._registry.limits
        if limits is not None and len(leg.token_ids) > limits.max_prompt_tokens:
            return []
        return self._registry.takers("prefill")

    def _choose(self, leg: Leg, workers: list[Worker], loads: Mapping[str, Load]) -> Worker | None:
        """Where it failed before it goes again only if there is no one else.

        Nor to who leaves soon: a long answer would move again and again in a rolling restart.
        """
        others = [w for w in workers if w.worker_id not in leg.failed_at] or workers
        staying = [w for w in others if not w.to_be_replaced]
        return self._router.choose(staying or others, loads)

    def _start(self, leg: Leg, prefiller: Worker | None, decoder: Worker, now: float) -> Send:
        first = prefiller or decoder
        leg.phases[decoder.worker_id] = "awaiting"
        leg.phases[first.worker_id] = "prefilling"
        leg.prefill_worker_id, leg.decode_worker_id = first.worker_id, decoder.worker_id
        self.num_local_prefills += prefiller is None
        tracked, request = leg.tracked, leg.tracked.request
        tracked.timeline.dispatched(first.worker_id, decoder.worker_id, leg.attempt, now)
        message = m.Prefill(
            leg.leg_id,
            leg.attempt,
            self._epoch,
            leg.token_ids,
            len(request.token_ids),
            tuple(choice for choice in request.choices if choice.choice_id in leg.choice_ids),
            request.sampling,
            deadline_s=tracked.deadline - now,
            stall_timeout_s=self._patience_s(leg),
            decode_worker_id=decoder.worker_id if prefiller else None,
            decode_endpoint=decoder.endpoint if prefiller else None,
        )
        return Send(first.identity, message)


def _with_room(
    workers: Iterable[Worker],
    has_room: Callable[[WorkerFacts, Load, Leg], bool],
    leg: Leg,
    loads: Mapping[str, Load],
) -> list[Worker]:
    """Those that may be given a leg now."""
    return [
        w
        for w in workers
        if not w.refuses and has_room(w.facts, loads.get(w.worker_id, Load()), leg)
    ]
