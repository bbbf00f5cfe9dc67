"""A state machine with workers that have joined it, and short words for what tests do to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from coordinator.events import Action, Deliver, Event, MessageReceived, NewRequest, Send, TimePassed
from coordinator.state import Settings, State
from splitserve.config import Fingerprint, Role
from splitserve.request import Sampling
from splitserve.wire import messages as m
from tests.unit.coordinator.scripted_worker import facts

EPOCH = "epoch"
FINGERPRINT = Fingerprint("weights", "config", "tokenizer")
LAUNCHER = b"launcher"
LAUNCHER_HELLO = m.Hello("launcher", "launcher", "launcher", 1, "host")
TIMES = m.HandoffTimes(0.1, 0.4, 0.5, 0.1, 0.3)
BASE_URL = "http://127.0.0.1:8000"

A = TypeVar("A")


def settings(**changes: Any) -> Settings:
    return dataclasses.replace(Settings(EPOCH, 512, FINGERPRINT.tokenizer), **changes)


def hello(role: Role, worker_id: str, launch_id: str = "", **changes: Any) -> m.Hello:
    endpoints = (f"tcp://{worker_id}:1",) if role == "decode" else ()
    return m.Hello(
        worker_id, role, launch_id or worker_id, 7, "host", endpoints, facts(FINGERPRINT, **changes)
    )


def request(
    request_id: str = "r", num_tokens: int = 5, num_choices: int = 1, **changes: Any
) -> NewRequest:
    sampling = Sampling(max_tokens=changes.pop("max_tokens", 8))
    options: dict[str, Any] = {"timeout_s": 60.0, **changes}
    return NewRequest(
        request_id,
        tuple(range(num_tokens)),
        tuple(m.Choice(i, 1) for i in range(num_choices)),
        sampling,
        **options,
    )


class World:
    """Owns a State and its clock."""

    def __init__(self, num_prefill: int = 1, num_decode: int = 1, **options: Any) -> None:
        """All workers have joined; `workers` changes their facts."""
        changes: dict[str, Any] = options.pop("workers", {})
        self.state = State(settings(num_prefill=num_prefill, num_decode=num_decode, **options))
        self.now = 100.0
        for i in range(num_decode):
            self.join("decode", f"d{i}", **changes)
        for i in range(num_prefill):
            self.join("prefill", f"p{i}", **changes)
        if num_decode:  # nothing is missing: it has nothing to start
            self.hear("launcher", LAUNCHER_HELLO)

    def join(self, role: Role, worker_id: str, launch_id: str = "", **changes: Any) -> list[Action]:
        return self.hear(worker_id, hello(role, worker_id, launch_id, **changes))

    def hear(self, sender: str, message: m.ToCoordinator) -> list[Action]:
        """A message arrives from a worker (or launcher) whose socket has its name."""
        return self.handle(MessageReceived(sender.encode(), message))

    def handle(self, event: Event) -> list[Action]:
        return self.state.handle(event, self.now)

    def submit(self, *requests: NewRequest) -> list[Action]:
        return self.state.submit(requests, self.now)

    def wait(self, seconds: float, *, beating: bool = True) -> list[Action]:
        """Time passes; living workers go on beating unless told otherwise."""
        self.now += seconds
        actions: list[Action] = []
        if beating:
            for worker in self.state.registry.alive():
                actions += self.beat(worker.worker_id)
        return [*actions, *self.handle(TimePassed())]

    def beat(
        self, worker_id: str, loop_age_s: float = 0.0, *, draining: bool = False
    ) -> list[Action]:
        beat = m.Heartbeat(worker_id, EPOCH, loop_age_s, m.WorkerStats(), draining)
        return self.handle(MessageReceived(f"{worker_id}/heartbeat".encode(), beat))

    # -- what workers say ---------------------------------------------------------------------

    def first_token(
        self,
        worker_id: str,
        *rows: m.TokenRow,
        request_id: str = "r",
        attempt: int = 0,
        num_cached: int = 0,
    ) -> list[Action]:
        rows = rows or (row(0, 10),)
        said = m.FirstToken(request_id, attempt, EPOCH, rows, 0.1, 0.2, num_cached)
        return self.hear(worker_id, said)

    def handed_over(self, worker_id: str, request_id: str = "r") -> list[Action]:
        return self.hear(worker_id, m.HandedOver(request_id, 0, EPOCH, 1000, TIMES))

    def tokens(self, worker_id: str, *rows: m.TokenRow) -> list[Action]:
        return self.hear(worker_id, m.Tokens(EPOCH, rows))

    def failed(
        self, worker_id: str, stage: m.Stage = "prefill", request_id: str = "r", **more: Any
    ) -> list[Action]:
        said = m.Failed(request_id, more.pop("attempt", 0), EPOCH, stage, "why", False)
        return self.hear(worker_id, dataclasses.replace(said, **more))

    def refused(
        self, worker_id: str, reason: str = "why", request_id: str = "r", attempt: int = 0
    ) -> list[Action]:
        """Not admitted, and another worker might."""
        said = m.Failed(request_id, attempt, EPOCH, "admission", reason, True)
        return self.hear(worker_id, said)

    # -- what must hold -----------------------------------------------------------------------

    def at_rest(self) -> bool:
        """Nothing is remembered of any request."""
        requests = self.state.requests
        nothing = not requests.ids and not len(requests.line) and requests.legs.num_in_flight == 0
        return nothing and requests.legs.loads() == {}


def row(
    first_index: int,
    *tokens: int,
    finish: Any = None,
    request_id: str = "r",
    choice_id: int = 0,
    attempt: int = 0,
) -> m.TokenRow:
    return m.TokenRow(request_id, attempt, choice_id, first_index, tokens, None, finish)


def of(actions: Sequence[Action], kind: type[A]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def sent(actions: Sequence[Action], kind: type[A]) -> list[tuple[str, A]]:
    """(receiver, message) of every message of one kind."""
    return [
        (action.identity.decode(), action.message)
        for action in of(actions, Send)
        if isinstance(action.message, kind)
    ]


def released(actions: Sequence[Action]) -> list[tuple[str, str, int]]:
    """(receiver, request_id, attempt) of every Release."""
    return [(to, said.request_id, said.attempt) for to, said in sent(actions, m.Release)]


def delivered(actions: Sequence[Action], choice_id: int = 0) -> list[int]:
    """Token ids that went to the client."""
    return [
        token.token_id
        for action in of(actions, Deliver)
        if action.choice_id == choice_id
        for token in action.tokens
    ]
