"""One request inside the coordinator, the legs in which workers serve it, and their load.

Workers know *legs*. A request begins as one leg with all its choices. When a worker is lost, a leg
goes on elsewhere as its next attempt, behind what was delivered; choices that have come apart by
then go on as a leg each.

    request r, n = 2    leg r: choices 0 and 1 ── a decode worker dies ──► leg r.0: choice 0
                                                                          leg r.1: choice 1

What a worker has of a leg is its phase there. Loads are sums over these phases, made when they
are asked for: nothing is counted up and down, so nothing can leak.

      prefill worker    prefilling ──FirstToken──► transferring ──HandedOver──► (gone)
      decode worker     awaiting ───────────Tokens─────────► decoding ──all finished──► (gone)
      the same, local   prefilling ──FirstToken──► decoding ──all finished──► (gone)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from coordinator.events import NewRequest
from coordinator.token_order import TokenOrder
from splitserve.timeline import Timeline
from splitserve.wire import messages as m

# Of one leg. Attempts have no bound of their own. Each follows a failure, a worker's departure
# (it makes one), a worker's first refusal, or a step that was longer than its patience.
MAX_FAILURES = 6
Phase = Literal["prefilling", "transferring", "awaiting", "decoding"]


@dataclass(slots=True, eq=False)
class Tracked:
    """A request from its arrival to its end. `order` is its age: smaller is older."""

    request: NewRequest
    order: int
    deadline: float
    timeline: Timeline
    choices: dict[int, TokenOrder] = field(default_factory=dict)
    delivered: dict[int, list[int]] = field(default_factory=dict)  # token ids of each choice
    stopped: set[int] = field(default_factory=set)  # choices that a stop string ended
    legs: list[Leg] = field(default_factory=list)
    num_cached_tokens: int | None = None  # of the prompt, when it was first computed
    linger_until: float | None = None  # complete, but its transfer's timing is still to come

    @classmethod
    def of(cls, request: NewRequest, order: int, now: float) -> Tracked:
        """With its first leg."""
        limit, choice_ids = request.sampling.max_tokens, [c.choice_id for c in request.choices]
        tracked = cls(
            request,
            order,
            deadline=now + request.timeout_s,
            timeline=Timeline(now if request.received_at is None else request.received_at),
            choices={choice_id: TokenOrder(limit) for choice_id in choice_ids},
            delivered={choice_id: [] for choice_id in choice_ids},
        )
        tracked.legs = [Leg(request.request_id, tracked, tuple(choice_ids), request.token_ids)]
        return tracked

    def computed(self, num_cached: int) -> None:
        """The prompt is; a later attempt at it finds more in the cache, by its own doing."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = max(0, min(num_cached, len(self.request.token_ids)))

    def ended(self, choice_id: int) -> bool:
        """Whether the client has all of a choice that it will get."""
        return self.choices[choice_id].finished or choice_id in self.stopped

    @property
    def complete(self) -> bool:
        return all(map(self.ended, self.choices))

    @property
    def transferring(self) -> bool:
        return any("transferring" in leg.phases.values() for leg in self.legs)

    def due(self) -> float:
        return self.deadline if self.linger_until is None else self.linger_until


@dataclass(slots=True, eq=False)
class Leg:
    """What workers know as one request: choices that go on from one history, `token_ids`."""

    leg_id: str  # the request_id on the wire
    tracked: Tracked
    choice_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    attempt: int = 0
    computed_from: int = 0  # the attempt whose Prefill counts; those after it were retargets
    phases: dict[str, Phase] = field(default_factory=dict)  # worker_id → what it does here
    prefill_worker_id: str | None = None
    decode_worker_id: str | None = None
    failed_at: set[str] = field(default_factory=set)  # workers that others are preferred to
    num_failures: int = 0  # of the attempts before this one
    patience: int = 1  # how many stall timeouts its hand-off is given
    lost_to: str = ""  # why the attempt before this one ended

    @property
    def request_id(self) -> str:
        return self.tracked.request.request_id

    @property
    def num_choices(self) -> int:
        return len(self.choice_ids)

    @property
    def open_choices(self) -> list[int]:
        """Choices that are not over for the client."""
        return [i for i in self.choice_ids if not self.tracked.ended(i)]

    @property
    def all_sampled(self) -> bool:
        """Whether workers have ended every choice: no worker decodes it any more."""
        return all(self.tracked.choices[i].finished for i in self.choice_ids)

    @property
    def is_decoding(self) -> bool:
        return self.phases.get(self.decode_worker_id or "") == "decoding"

    @property
    def is_where_it_began(self) -> bool:
        """Whether no more than the first tokens were delivered of what this attempt makes."""
        first = len(self.token_ids) - len(self.tracked.request.token_ids) + 1
        return all(len(self.tracked.delivered[i]) <= first for i in self.choice_ids)

    def retarget_came_late(self, worker_id: str, message: m.Failed) -> bool:
        """Whether a prefill worker only says that it had handed all over before a Retarget came."""
        is_its = worker_id == self.prefill_worker_id and self.attempt > self.computed_from
        return is_its and message.stage == "transfer" and not message.kept

    def next_attempts(self) -> list[Leg]:
        """The legs that go on for this one, where the client is; nobody has anything of them yet.

        Choices that have had no token yet stay together.
        """
        tracked, open_choices = self.tracked, self.open_choices
        assert open_choices, f"nothing of {self.leg_id} goes on"
        for choice_id in open_choices:
            tracked.choices[choice_id] = tracked.choices[choice_id].restarted()
        if not any(tracked.delivered[choice_id] for choice_id in open_choices):
            return [self._next(self.leg_id, tuple(open_choices))]
        if len(open_choices) == 1:
            return [self._next(self.leg_id, tuple(open_choices))]
        base = tracked.request.request_id
        return [self._next(f"{base}.{choice_id}", (choice_id,)) for choice_id in open_choices]

    def _next(self, leg_id: str, choice_ids: tuple[int, ...]) -> Leg:
        attempt = self.attempt + 1
        token_ids = (*self.tracked.request.token_ids, *self.tracked.delivered[choice_ids[0]])
        return Leg(
            leg_id,
            self.tracked,
            choice_ids,
            token_ids,
            attempt,
            computed_from=attempt,
            failed_at=set(self.failed_at),
            num_failures=self.num_failures,
            patience=self.patience,
            lost_to=self.lost_to,
        )


@dataclass(slots=True)
class Load:
    """What one worker has been given and has not finished."""

    num_requests: int = 0
    num_choices: int = 0
    num_prompt_tokens: int = 0  # of prompts not yet computed
    longest_prompt: int = 0  # tokens of the longest of these
    num_prompt_blocks: int = 0  # that hold a prompt, computed or not
    num_decode_blocks: int = 0  # a prompt's full blocks and one more for each choice


def loads_of(active: Iterable[Leg], block_size: int) -> dict[str, Load]:
    """The load of every worker that has something, by worker_id."""
    loads: dict[str, Load] = {}
    for leg in active:
        num_tokens = len(leg.token_ids)
        for worker_id, phase in leg.phases.items():
            load = loads.setdefault(worker_id, Load())
            load.num_requests += 1
            load.num_choices += leg.num_choices
            load.num_prompt_blocks += -(-num_tokens // block_size)
            load.num_decode_blocks += num_tokens // block_size + leg.num_choices
            if phase == "prefilling":
                load.num_prompt_tokens += num_tokens
                load.longest_prompt = max(load.longest_prompt, num_tokens)
    return loads
