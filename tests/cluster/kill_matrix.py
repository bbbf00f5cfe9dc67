"""Requests brought into every state at once, one process signalled, and what became of each.

One signal tries a column of the matrix: each worker has a request in each state, so whichever
process is hit, all others are bystanders in the same states.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from tests.cluster.clients import Outcome, ask
from tests.cluster.faulty import FaultyRing
from tests.cluster.harness import Body
from tests.faults import pace
from tests.waiting import wait_until

Victim = Literal["coordinator", "prefill", "decode"]
Place = dict[str, str | None]  # role → worker_id

QUEUED = 0x51  # a byte that holds nothing: such a request waits because the windows are full
NAMES = {QUEUED: "queued", **pace.NAMES}
# In the order in which requests can be brought there: a prompt that is being computed closes the
# window of its worker.
STATES = (
    pace.DECODING,
    pace.COMMITTED,
    pace.UNCOMMITTED,
    pace.FRAMES,
    pace.RESERVED,
    pace.PREFILLING,
    QUEUED,
)
HANDED_OVER = (pace.DECODING, pace.COMMITTED)  # nothing is left of it on the prefill side
NUM_SERIALS = 4
NUM_PROMPT_TOKENS = 120
MAX_TOKENS = 24
SILENCE_S = 3.0  # after which a stopped process counts as dead
END_S = 5.0


def prompt_of(state: int, serial: int) -> list[int]:
    letters = random.Random(f"{state} {serial}")
    body = [letters.randrange(32, 127) for _ in range(NUM_PROMPT_TOKENS - 2)]
    return [state, serial, *body]


def body_of(state: int, serial: int) -> Body:
    stream = serial % 2 == 0
    return {"prompt": prompt_of(state, serial), "max_tokens": MAX_TOKENS, "stream": stream}


@dataclass(slots=True)
class Held:
    """A request that a client waits for, and where it is held."""

    state: int
    serial: int
    future: Future[Outcome]
    place: Place = field(default_factory=dict)

    def is_at(self, worker_id: str) -> bool:
        return worker_id in self.place.values()


@dataclass(frozen=True, slots=True)
class Cell:
    """What a signal did to the requests in one state that the victim had."""

    state: str
    victim: Victim
    signal: str
    outcome: str
    ended_s: float | None = None
    recovery_s: float | None = None

    def __str__(self) -> str:
        ended = "" if self.ended_s is None else f"{self.ended_s:5.2f}"
        recovery = "" if self.recovery_s is None else f"{self.recovery_s:5.2f}"
        name = f"{self.state:31} {self.victim:12} {self.signal:8}"
        return f"{name} {ended:>6} {recovery:>6}  {self.outcome}"


HEADING = f"{'state':31} {'victim':12} {'signal':8} {'end s':>6} {'whole':>6}  outcome"


class Matrix:
    """Owns a cluster's clients, the right answers, and the cells tried so far."""

    def __init__(self, ring: FaultyRing, pool: ThreadPoolExecutor) -> None:
        self.ring = ring
        self.cells: list[Cell] = []
        self.faults: list[str] = []
        self._pool = pool
        self._right = self._ask_undisturbed()

    def strike(self, victim: Victim, number: signal.Signals, *, draining: bool = False) -> None:
        """Try a column. What is wrong goes to `faults`, with the name of its cell."""
        held = self._bring_into_states()
        worker_id, pid = self._choose(victim, held)
        if draining:
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda: self._state_of(worker_id) == "draining", 5, f"{worker_id} drains")
        started = time.monotonic()
        os.kill(pid, number)
        self.ring.pace.write(holding=False)
        ended = [(one, one.future.result(60)) for one in held]
        name = f"{victim} {number.name}{' while it drains' if draining else ''}"
        recovery_s = self._recover(name, pid, started)
        limit_s = END_S + (SILENCE_S if number is signal.SIGSTOP else 0)
        for one, outcome in ended:
            fault = self._fault_of(victim, one, outcome)
            if outcome.ended_at - started > limit_s:
                fault += f" after {outcome.ended_at - started:.1f} s"
            if fault:
                where = "on it" if one.is_at(worker_id) else f"elsewhere: {one.place}"
                self.faults.append(f"{name}, {NAMES[one.state]} {where}: {fault}")
        for state in STATES:
            in_state = [(one, outcome) for one, outcome in ended if one.state == state]
            on_it = [x for x in in_state if victim == "coordinator" or x[0].is_at(worker_id)]
            words = ", ".join(sorted({self._word(*x) for x in on_it or in_state}))
            outcome_text = words if on_it else f"{words} (nothing of it there)"
            ended_s = max(outcome.ended_at for _, outcome in on_it or in_state) - started
            state_name = f"draining, {NAMES[state]}" if draining else NAMES[state]
            cell = Cell(state_name, victim, number.name, outcome_text, ended_s, recovery_s)
            self.cells.append(cell)

    def _ask_undisturbed(self) -> dict[tuple[int, int], tuple[int, ...]]:
        keys = list(itertools.product(STATES, range(NUM_SERIALS)))
        futures = [self._pool.submit(ask, self.ring.base_url, body_of(*key)) for key in keys]
        outcomes = [future.result(60) for future in futures]
        assert {outcome.kind for outcome in outcomes} == {"whole"}, list(map(str, outcomes))
        return {key: outcome.token_ids for key, outcome in zip(keys, outcomes, strict=True)}

    def _bring_into_states(self) -> list[Held]:
        """Every worker gets a request in every state it can have one in."""
        self.ring.pace.forget_marks()
        self.ring.pace.write(holding=True)
        workers = {w["worker_id"]: w["role"] for w in self.ring.cluster()["workers"]}
        held: list[Held] = []
        for state in STATES[:-1]:
            missing = {w for w in workers if self._can_be_at(state, workers[w])}
            num_wanted = 2 if state == pace.PREFILLING else NUM_SERIALS
            for serial in range(num_wanted):
                if missing:
                    held.append(self._hold(state, serial))
                    missing -= {w for w in missing if held[-1].is_at(w)}
        for serial in range(2):
            held.append(self._start(QUEUED, serial))
        wait_until(lambda: self._num_waiting() == 2, 10, "two requests in the queue")
        return held

    def _start(self, state: int, serial: int) -> Held:
        future = self._pool.submit(ask, self.ring.base_url, body_of(state, serial))
        return Held(state, serial, future)

    def _hold(self, state: int, serial: int) -> Held:
        one = self._start(state, serial)
        mark = self.ring.wait_marked((state, serial))
        one.place = {role: mark[role] for role in ("prefill", "decode")}
        return one

    def _can_be_at(self, state: int, role: str) -> bool:
        return role == "decode" or state not in HANDED_OVER

    def _choose(self, victim: Victim, held: list[Held]) -> tuple[str, int]:
        """The process that is hit: of workers, one that has a prompt which is being computed."""
        if victim == "coordinator":
            return "coordinator", self.ring.coordinator_pid()
        prompt = next(one for one in held if one.state == pace.PREFILLING)
        worker_id = prompt.place[victim]
        assert worker_id is not None
        return worker_id, self.ring.pid_of(worker_id)

    def _recover(self, name: str, pid: int, started: float) -> float:
        """Wait until the cluster is whole and nothing is held on the survivors."""
        wait_until(lambda: not self._has(pid), 15, f"the end of process {pid}")
        self.ring.wait_whole()
        recovery_s = time.monotonic() - started
        try:
            self.ring.assert_drained()
        except AssertionError as error:
            self.faults.append(f"{name}: {error}")
        return recovery_s

    def _has(self, pid: int) -> bool:
        return os.path.exists(f"/proc/{pid}")

    def _fault_of(self, victim: Victim, one: Held, outcome: Outcome) -> str:
        """What is wrong with how a request ended; empty when nothing is."""
        if victim == "coordinator":
            return "" if outcome.kind in ("broken", "error") else f"ended {outcome}"
        if outcome.kind != "whole":
            return str(outcome)
        return "" if self._is_right(one, outcome) else "wrong tokens"

    def _is_right(self, one: Held, outcome: Outcome) -> bool:
        return outcome.token_ids == self._right[one.state, one.serial]

    def _word(self, one: Held, outcome: Outcome) -> str:
        if outcome.kind == "whole":
            return "right tokens" if self._is_right(one, outcome) else "WRONG TOKENS"
        if outcome.kind == "broken":
            return "connection broken, no [DONE]"
        return f"{outcome.kind}: {outcome.message[:60]}"

    def _state_of(self, worker_id: str) -> str | None:
        workers = self.ring.cluster()["workers"]
        return next((w["state"] for w in workers if w["worker_id"] == worker_id), None)

    def _num_waiting(self) -> int:
        return int(self.ring.cluster()["coordinator"]["num_requests_waiting"])


NO_DRAINING_COORDINATOR = [
    Cell("draining", "coordinator", name, "no such state: told to stop, it ends all it has at once")
    for name in ("SIGKILL", "SIGSTOP", "SIGTERM")
]
