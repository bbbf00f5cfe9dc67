"""The legs of all requests and their way through the workers. Pure.

in the line ─place─► at workers ──► dropped, with a Release to whoever still has it
     ▲                   │
     └──── restart ──────┤  the next attempt, behind what was delivered
                         └─ retarget: the same prompt, its KV kept, to another decode worker
"""

from __future__ import annotations

from coordinator.dispatcher import Dispatcher
from coordinator.events import Action, Send
from coordinator.registry import Registry, Worker
from coordinator.tracked import Leg, Load, loads_of
from coordinator.waiting import WaitingLine
from splitserve.wire import messages as m

# For how long a worker remembers the release of something that nobody here knows.
FORGOTTEN_S = 60.0

OfLeg = m.FirstToken | m.HandedOver | m.Failed | m.TokenRow | m.Begun


class Legs:
    """Owns the legs that have not ended, in the line or at workers."""

    def __init__(
        self, epoch: str, registry: Registry, dispatcher: Dispatcher, line: WaitingLine
    ) -> None:
        self.line = line
        self._epoch = epoch
        self._registry = registry
        self._dispatcher = dispatcher
        self._legs: dict[str, Leg] = {}

    @property
    def num_in_flight(self) -> int:
        """Legs at workers."""
        return len(self._legs) - len(self.line)

    def loads(self) -> dict[str, Load]:
        limits = self._registry.limits
        return loads_of(self._legs.values(), limits.block_size) if limits else {}

    def add(self, leg: Leg) -> None:
        """A leg, or its next attempt, waits for workers."""
        self._legs[leg.leg_id] = leg
        self.line.add(leg)

    def at(self, worker: Worker) -> list[Leg]:
        """Legs that a worker has something of."""
        return [leg for leg in self._legs.values() if worker.worker_id in leg.phases]

    def lives(self, leg: Leg) -> bool:
        """Whether this attempt has not ended."""
        return self._legs.get(leg.leg_id) is leg

    def find(self, worker: Worker, message: OfLeg) -> Leg | None:
        """The leg a worker speaks of, if this attempt of it was given to that worker."""
        leg = self._legs.get(message.request_id)
        if leg is None:
            return None
        if isinstance(message, m.FirstToken) and worker.worker_id == leg.prefill_worker_id:
            # A Retarget may have crossed it: the prompt is the same.
            return leg if leg.computed_from <= message.attempt <= leg.attempt else None
        given_to = (leg.prefill_worker_id, leg.decode_worker_id)
        is_its = worker.worker_id in given_to and message.attempt == leg.attempt
        return leg if is_its else None

    def place_next(self, now: float) -> Send | None:
        """Send the first of the line to workers with room; None: they have none, or no one waits.

        Nobody passes the first.
        """
        leg = self.line.first()
        send = None if leg is None else self._dispatcher.place(leg, self.loads(), now)
        if leg is not None and send is not None:
            self.line.remove(leg.leg_id)
        return send

    def retarget(self, leg: Leg, now: float) -> list[Action]:
        """Point a prompt that its prefill worker still has to another decode worker.

        Nothing, when it can't be: none has room, or what was kept is not what goes on.
        """
        prefill_id = leg.prefill_worker_id or ""
        prefiller = self._registry.workers.get(prefill_id)
        has_kv = prefill_id in leg.phases and prefill_id not in leg.failed_at
        if prefiller is None or not has_kv or prefill_id == leg.decode_worker_id:
            return []
        if leg.is_decoding or not leg.is_where_it_began:
            return []
        decoder = self._dispatcher.other_decoder(leg, self.loads())
        if decoder is None:
            return []
        assert decoder.endpoint is not None
        previous = self._registry.workers.get(leg.decode_worker_id or "")
        releases = [] if previous is None else self.leave(leg, previous, now)
        leg.attempt += 1
        leg.tracked.timeline.retargeted(leg.attempt - 1, leg.attempt, decoder.worker_id)
        leg.decode_worker_id = decoder.worker_id
        leg.phases[decoder.worker_id] = "awaiting"
        retarget = m.Retarget(
            leg.leg_id, leg.attempt, self._epoch, decoder.worker_id, decoder.endpoint
        )
        return [*releases, Send(prefiller.identity, retarget)]

    def restart(self, leg: Leg, now: float) -> list[Action]:
        """Back into the line; its age puts it before all that came later."""
        releases = self.drop(leg, now)
        for following in leg.next_attempts():
            leg.tracked.legs.append(following)
            self.add(following)
        return releases

    def drop(self, leg: Leg, now: float) -> list[Action]:
        """Forget a leg, here and at every worker that still has it."""
        del self._legs[leg.leg_id]
        self.line.remove(leg.leg_id)
        leg.tracked.legs.remove(leg)
        actions: list[Action] = []
        for worker_id in list(leg.phases):
            if worker := self._registry.workers.get(worker_id):
                actions += self.leave(leg, worker, now)
        return actions

    def leave(self, leg: Leg, worker: Worker, now: float) -> list[Action]:
        """One worker is to forget a leg, if it lives and has something of it."""
        if leg.phases.pop(worker.worker_id, None) is None or worker.state == "dead":
            return []
        left_s = max(leg.tracked.deadline - now, 0.0)
        release = m.Release(leg.leg_id, leg.attempt, self._epoch, left_s)
        return [Send(worker.identity, release)]

    def stop_decoding(self, leg: Leg, now: float) -> list[Action]:
        """Nobody wants more of a leg; what its prefill worker still has goes on."""
        decoder = self._registry.workers.get(leg.decode_worker_id or "")
        return self.leave(leg, decoder, now) if decoder is not None and leg.is_decoding else []

    def forget_order(self, worker: Worker, request_id: str, attempt: int) -> Send:
        """A worker speaks of something that is over here."""
        release = m.Release(request_id, attempt, self._epoch, FORGOTTEN_S)
        return Send(worker.identity, release)
