"""Steady load from many clients, each answer compared with the one the cluster gave in peace."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from tests.cluster.clients import Outcome, ask, prompt
from tests.cluster.harness import Body

REST_S = 0.2  # after a request that failed, before the client's next


@dataclass(frozen=True, slots=True)
class Question:
    """A request, and its answer."""

    body: Body
    right: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the load, and how it ended."""

    question: Question
    outcome: Outcome
    took_s: float

    @property
    def verdict(self) -> str:
        """right, or what else it was."""
        if self.outcome.kind != "whole":
            return self.outcome.kind
        return "right" if self.outcome.token_ids == self.question.right else "wrong"


def questions(base_url: str, number: int = 48, max_tokens: int = 48) -> list[Question]:
    """Short and long prompts, greedy and seeded, streamed and not; asked in peace first."""
    bodies: list[Body] = []
    for index in range(number):
        body: Body = {"prompt": prompt(1000 + index, 8 + 9 * index % 180)}
        body |= {"max_tokens": 4 + 7 * index % max_tokens, "stream": index % 3 != 0}
        if index % 2:
            body |= {"temperature": 0.8, "seed": index}
        bodies.append(body)
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda body: ask(base_url, body), bodies))
    assert {outcome.kind for outcome in outcomes} == {"whole"}, list(map(str, outcomes))
    return [
        Question(body, outcome.token_ids) for body, outcome in zip(bodies, outcomes, strict=True)
    ]


@dataclass(slots=True)
class Load:
    """Owns the clients. Use as a context manager; `asked` is complete afterwards."""

    base_url: str
    questions: Sequence[Question]
    num_clients: int = 8
    seed: int = 0
    asked: list[Asked] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Self:
        for number in range(self.num_clients):
            thread = threading.Thread(target=self._run, args=(random.Random(self.seed + number),))
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(90)
        assert not any(thread.is_alive() for thread in self._threads), "a request never ended"

    @property
    def verdicts(self) -> Counter[str]:
        return Counter(one.verdict for one in self.asked)

    def failures(self) -> list[str]:
        """What became of requests that were not answered right."""
        return [f"{x.verdict}: {x.outcome}" for x in self.asked if x.verdict != "right"]

    def _run(self, chance: random.Random) -> None:
        while not self._over.is_set():
            question = chance.choice(self.questions)
            started = time.monotonic()
            outcome = ask(self.base_url, question.body)
            self.asked.append(Asked(question, outcome, time.monotonic() - started))
            if outcome.kind != "whole":
                self._over.wait(REST_S)
