"""One request inside the coordinator, and what each worker's share of the load is.

What a worker has of a request is its phase there. Loads are sums over these phases, made when
they are asked for: nothing is counted up and down, so nothing can leak.

      prefill worker    prefilling ──FirstToken──► transferring ──HandedOver──► (gone)
      decode worker     awaiting ────FirstToken or Tokens──► decoding ──all finished──► (gone)
      the same, local   prefilling ──FirstToken──► decoding ──all finished──► (gone)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from coordinator.events import NewRequest
from coordinator.token_order import TokenOrder
from splitserve.timeline import Timeline

MAX_RESTARTS = 3  # of one request
Phase = Literal["prefilling", "transferring", "awaiting", "decoding"]


@dataclass(slots=True, eq=False)
class Tracked:
    """A request from its arrival to its end. `order` is its age: smaller is older."""

    request: NewRequest
    order: int
    deadline: float
    timeline: Timeline
    attempt: int = 0
    phases: dict[str, Phase] = field(default_factory=dict)  # worker_id → what it does here
    choices: dict[int, TokenOrder] = field(default_factory=dict)
    delivered: list[int] = field(default_factory=list)  # token ids, when there is one choice
    stopped: set[int] = field(default_factory=set)  # choices that a stop string ended
    linger_until: float | None = None  # complete, but its transfer's timing is still to come

    @classmethod
    def of(cls, request: NewRequest, order: int, now: float) -> Tracked:
        limit = request.sampling.max_tokens
        return cls(
            request,
            order,
            deadline=now + request.timeout_s,
            timeline=Timeline(arrived_at=now),
            choices={choice.choice_id: TokenOrder(limit) for choice in request.choices},
        )

    @property
    def can_restart(self) -> bool:
        """Whether another attempt can go on where the client is.

        With one choice, what was delivered goes behind the prompt; several would each need that.
        """
        untouched = not any(order.num_delivered for order in self.choices.values())
        return self.attempt < MAX_RESTARTS and (untouched or len(self.choices) == 1)

    def restart(self) -> None:
        """Begin the next attempt; nobody has anything of it yet."""
        assert self.can_restart
        self.attempt += 1
        self.phases = {}
        limit = self.request.sampling.max_tokens
        self.choices = {i: TokenOrder(limit, o.num_delivered) for i, o in self.choices.items()}
        self.timeline.prefill_worker_id = self.timeline.decode_worker_id = None

    @property
    def all_sampled(self) -> bool:
        """Whether workers have ended every choice: no worker decodes it any more."""
        return all(order.finished for order in self.choices.values())

    @property
    def complete(self) -> bool:
        """Whether the client has all it will get."""
        return all(o.finished or i in self.stopped for i, o in self.choices.items())

    def due(self) -> float:
        return self.deadline if self.linger_until is None else self.linger_until


@dataclass(slots=True)
class Load:
    """What one worker has been given and has not finished."""

    num_requests: int = 0
    num_choices: int = 0
    num_prompt_tokens: int = 0  # of prompts not yet computed
    num_prompt_blocks: int = 0  # that hold a prompt, computed or not
    num_decode_blocks: int = 0  # a prompt's full blocks and one more for each choice


def loads_of(active: Iterable[Tracked], block_size: int) -> dict[str, Load]:
    """The load of every worker that has something, by worker_id."""
    loads: dict[str, Load] = {}
    for tracked in active:
        num_tokens, num_choices = len(tracked.request.token_ids), len(tracked.request.choices)
        for worker_id, phase in tracked.phases.items():
            load = loads.setdefault(worker_id, Load())
            load.num_requests += 1
            load.num_choices += num_choices
            load.num_prompt_blocks += -(-num_tokens // block_size)
            load.num_decode_blocks += num_tokens // block_size + num_choices
            if phase == "prefilling":
                load.num_prompt_tokens += num_tokens
    return loads
