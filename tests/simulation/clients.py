"""Who asks, and what they are owed: every answer exactly, once, in order, by its deadline."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator import events as e
from coordinator.limits import Limits
from splitserve.errors import InvalidRequestError
from splitserve.request import Sampling
from splitserve.wire.messages import Choice
from tests.fake_runner import VOCAB_SIZE, answer
from tests.simulation.world import SimulationError, World

TIMEOUT_S = 60.0
LATE_S = 1.0
MAX_TOKENS = (1, 1, 2, 3, 8, 20, 30)


@dataclass(slots=True)
class Asked:
    """One request, what its answer has to be, and what has come of it."""

    request: e.NewRequest
    asked_at: float
    wanted: dict[int, list[int]]  # of each choice
    text_stops: dict[int, int]  # choices that a stop string ends, and behind how many tokens
    got: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    ended_at: float | None = None
    error: str = ""


class Clients:
    """Owns every request of a run."""

    def __init__(self, world: World) -> None:
        self.all: list[Asked] = []
        self.open: dict[str, Asked] = {}
        self.refusals: list[tuple[float, str]] = []
        self._world = world

    # -- asking -------------------------------------------------------------------------------

    def draw(self, limits: Limits) -> Asked:
        """A request within the limits."""
        chance = self._world.chance
        most = min(limits.max_prompt_tokens, limits.max_total_tokens - 1)
        length = min(most, chance.choice((1, 3, 4, 5, 8, 17, 30, 44, most)))
        prompt = tuple(chance.randrange(10, VOCAB_SIZE) for _ in range(length))
        max_tokens = min(chance.choice(MAX_TOKENS), limits.max_total_tokens - length)
        choices = tuple(
            Choice(i, chance.randrange(1 << 30)) for i in range(self._num(limits, length))
        )
        full = {c.choice_id: answer(prompt, c.seed, max_tokens) for c in choices}
        stop_ids = tuple(chance.choice(full[i]) for i in full if chance.random() < 0.25)
        text_stops = {i: chance.randint(1, max_tokens) for i in full if chance.random() < 0.1}
        request = e.NewRequest(
            f"r{len(self.all)}",
            prompt,
            choices,
            Sampling(max_tokens=max_tokens, stop_token_ids=stop_ids),
            TIMEOUT_S,
            wants_timing=chance.random() < 0.3,
        )
        wanted = {i: _until_stop(tokens, stop_ids) for i, tokens in full.items()}
        return Asked(request, self._world.now, wanted, text_stops, {i: [] for i in full})

    def _num(self, limits: Limits, num_prompt_tokens: int) -> int:
        number = self._world.chance.choice((1, 1, 1, 2, 3))
        try:
            limits.check_choices(num_prompt_tokens, number)
        except InvalidRequestError:
            return 1
        return number

    def accepted(self, asked: Asked) -> None:
        self.all.append(asked)
        self.open[asked.request.request_id] = asked

    def refused(self, reason: str) -> None:
        self.refusals.append((self._world.now, reason))

    # -- what comes ---------------------------------------------------------------------------

    def deliver(self, action: e.Deliver) -> e.ChoiceStopped | None:
        """The next tokens of a choice; what follows when they hold a stop string."""
        asked = self._open(action.request_id, "tokens")
        i = action.choice_id
        if i in asked.stopped:
            return None  # they came in one message with the stop string
        if i in asked.finished:
            raise SimulationError(f"tokens behind the end of choice {i} of {action.request_id}")
        got = asked.got[i]
        got += [token.token_id for token in action.tokens]
        if got != asked.wanted[i][: len(got)]:
            raise SimulationError(f"{action.request_id} choice {i}: {got}, not {asked.wanted[i]}")
        if action.finish is not None:
            asked.finished[i] = action.finish
        stops_behind = asked.text_stops.get(i)
        if stops_behind is None or len(got) < stops_behind:
            return None
        asked.stopped.add(i)
        return e.ChoiceStopped(action.request_id, i, len(got) - stops_behind)

    def finish(self, action: e.Finish) -> None:
        """Every choice has to be whole."""
        asked = self._open(action.request_id, "Finish")
        for i, wanted in asked.wanted.items():
            whole = i in asked.finished and asked.got[i] == wanted
            if i not in asked.stopped and not whole:
                raise SimulationError(f"{action.request_id} choice {i} is cut: {asked.got[i]}")
        self._end(asked, "")

    def fail(self, action: e.Fail) -> None:
        self._end(self._open(action.request_id, "Fail"), str(action.error) or "no reason")

    def hang_up(self, request_id: str) -> None:
        """The client is gone; nothing may come for it any more."""
        self._end(self.open[request_id], "")

    def break_connections(self) -> None:
        """The coordinator is gone: every stream breaks."""
        for asked in list(self.open.values()):
            self._end(asked, "")

    def check_deadlines(self) -> None:
        now = self._world.now
        for asked in self.open.values():
            if now > asked.asked_at + TIMEOUT_S + LATE_S:
                raise SimulationError(f"{asked.request.request_id} is past its deadline")

    def _open(self, request_id: str, what: str) -> Asked:
        if request_id not in self.open:
            raise SimulationError(f"{what} for {request_id}, which has ended")
        return self.open[request_id]

    def _end(self, asked: Asked, error: str) -> None:
        del self.open[asked.request.request_id]
        asked.ended_at, asked.error = self._world.now, error
        if error:
            self._world.note(asked.request.request_id, "failed:", error)


def _until_stop(tokens: list[int], stop_ids: tuple[int, ...]) -> list[int]:
    for number, token in enumerate(tokens, 1):
        if token in stop_ids:
            return tokens[:number]
    return tokens
