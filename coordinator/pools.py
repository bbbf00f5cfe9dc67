"""How many workers there should be, and the processes the launcher was asked to run for it.

A *lineage* is a wanted worker over the restarts of its process. Pure: the clock is an argument.

    Launch ── dies ──► Restart, after a wait that doubles ──► Launch ── ... too often ──► given up
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.registry import Worker
from splitserve.config import MAX_WORKERS, ROLES, Role
from splitserve.errors import InvalidRequestError
from splitserve.restarts import RestartPolicy
from splitserve.wire.messages import Launched

MAX_FAILED_SHOWN = 8
MAX_STARTING = 16  # at once: a number that was a slip can still be taken back
LEAVE_DELAY_S = 0.5
# One that has loaded says Hello again between two steps.
HELLO_AGAIN_S = 60.0

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Lineage:
    """One wanted worker. Its first failure is kept: later ones often only follow from it."""

    role: Role
    policy: RestartPolicy
    num_failures: int = 0
    first_launch_id: str = ""  # the one that failed first
    reason: str = ""
    last_lines: str = ""
    given_up: bool = False


@dataclass(slots=True, eq=False)
class Launch:
    """A process the launcher was asked to start and has not seen to exit."""

    launch_id: str
    role: Role
    order: int
    lineage: Lineage
    hello_by: float  # or it is killed and started again
    is_planned: bool = False  # it follows a wish, not a death: requests may wait for it
    stopping: bool = False  # nobody waits for it any more: it leaves, or is dead
    replaces: str | None = None  # a worker_id: in a rolling restart


@dataclass(frozen=True, slots=True)
class Restart:
    """A launch that waits for its time."""

    due: float
    lineage: Lineage
    is_planned: bool = False


class Pools:
    """Owns the target counts, the launches, and the restarts to come."""

    def __init__(
        self,
        num_prefill: int,
        num_decode: int,
        max_restarts: int = 5,
        start_timeout_s: float = 600.0,
    ) -> None:
        self.targets: dict[Role, int] = {"prefill": num_prefill, "decode": num_decode}
        self.launches: dict[str, Launch] = {}
        self.failed: list[Lineage] = []  # those with a failure, the latest last; to be shown
        self._given_up: list[Lineage] = []
        self._max_restarts = max_restarts
        self._start_timeout_s = start_timeout_s
        self._restarts: list[Restart] = []
        self._num_launched: dict[Role, int] = {"prefill": 0, "decode": 0}

    def retarget(self, prefill: int, decode: int) -> None:
        """Raises InvalidRequestError for numbers that can't be. What was given up may try again."""
        for role, number in (("prefill", prefill), ("decode", decode)):
            if not 0 <= number <= MAX_WORKERS:
                raise InvalidRequestError(
                    f"{role} is {number}, it must be 0 to {MAX_WORKERS}", param=role
                )
        if decode == 0:
            raise InvalidRequestError(
                "decode is 0: the last decode worker can't be scaled away", param="decode"
            )
        self.targets = {"prefill": prefill, "decode": decode}
        self._restarts.clear()
        self._given_up.clear()
        self.failed = [lineage for lineage in self.failed if not lineage.given_up]

    def complete(self, workers: Iterable[Worker]) -> bool:
        """Whether every worker asked for is ready."""
        ready = [w.role for w in workers if w.state == "ready"]
        return all(ready.count(role) >= self.targets[role] for role in ROLES)

    def reclaim(self, workers: Iterable[Worker]) -> None:
        """Who was to leave because there were enough stays when there are not."""
        known = list(workers)
        for role in ROLES:
            missing = self.targets[role] - len(self._present(role, known))
            leaving = [w for w in known if w.role == role and w.can_stay]
            for worker in leaving[: max(0, missing)]:
                log.info("%s stays after all", worker.worker_id)
                worker.state, worker.drain_by = "ready", None
                if launch := self.launches.get(worker.launch_id):
                    launch.stopping = False

    def start_missing(
        self, workers: Iterable[Worker], now: float, is_planned: bool = False
    ) -> list[Launch]:
        """New launches, so that with those under way every pool has its target. `is_planned`:
        somebody wants more, nobody died."""
        known = list(workers)
        started: list[Launch] = []
        room = MAX_STARTING - len(self._awaited(known))
        for role in ROLES:
            given_up = sum(lineage.role == role for lineage in self._given_up)
            missing = self.targets[role] - len(self._present(role, known)) - given_up
            waiting = [restart for restart in self._restarts if restart.lineage.role == role]
            for needless in waiting[max(0, missing) :]:
                self._restarts.remove(needless)
            waiting = waiting[: max(0, missing)]
            for restart in [r for r in waiting if r.due <= now]:
                self._restarts.remove(restart)
                started.append(self._launch(restart.lineage, now, restart.is_planned))
            for _ in range(min(missing - len(waiting), room - len(started))):
                started.append(self._launch(self._lineage(role), now, is_planned))
        return started

    def is_coming(self, role: Role, workers: Iterable[Worker]) -> bool:
        """Whether one that takes the place of one that leaves is not ready yet."""
        under_way = any(x.is_planned and x.role == role for x in self._awaited(workers))
        return under_way or any(r.is_planned and r.lineage.role == role for r in self._restarts)

    def replacement_of(self, worker: Worker) -> Launch | None:
        """What was started to take a worker's place in a rolling restart."""
        launches = self.launches.values()
        return next((x for x in launches if x.replaces == worker.worker_id), None)

    def start_replacement(self, worker: Worker, now: float) -> Launch:
        """One launch over the target, which takes a worker's place once it is ready."""
        launch = self._launch(self._lineage(worker.role), now, is_planned=True)
        launch.replaces = worker.worker_id
        return launch

    def keep_replacement(self, worker_id: str) -> None:
        """Nothing is left to replace: what was started for it is a worker like any other."""
        for launch in self.launches.values():
            if launch.replaces == worker_id:
                launch.replaces = None

    def lost(self, launch: Launch, reason: str, now: float) -> None:
        """A process died: another takes its place, but not for ever."""
        if launch.stopping:
            return
        launch.stopping = True
        lineage = launch.lineage
        lineage.num_failures += 1
        if lineage.num_failures == 1:
            lineage.first_launch_id, lineage.reason = launch.launch_id, reason
            self.failed = [*self.failed, lineage][-MAX_FAILED_SHOWN:]
        delay_s = None if launch.replaces else lineage.policy.next_delay(now)
        if delay_s is not None:
            self._restarts.append(Restart(now + delay_s, lineage))
        elif not launch.replaces:
            lineage.given_up = True
            self._given_up.append(lineage)
            log.error("%s died too often and is given up: %s", launch.launch_id, reason)

    def leaves(self, launch: Launch, now: float) -> None:
        """Somebody else told a worker to go: another takes its place, and nothing has failed."""
        if not launch.stopping:
            launch.stopping = True
            if not launch.replaces:
                restart = Restart(now + LEAVE_DELAY_S, launch.lineage, is_planned=True)
                self._restarts.append(restart)

    def exited(self, launch_id: str, last_lines: str) -> None:
        """The launcher has reaped a process."""
        self.launches.pop(launch_id, None)
        for lineage in self.failed:
            if lineage.first_launch_id == launch_id:
                lineage.last_lines = last_lines

    def surplus(self, workers: Iterable[Worker]) -> list[Launch | Worker]:
        """What is over target, newest first: launches not up yet, then workers."""
        known = list(workers)
        over: list[Launch | Worker] = []
        for role in ROLES:
            present = self._present(role, known)
            over += present[: max(0, len(present) - self.targets[role])]
        return over

    def adopt(self, launched: Iterable[Launched], workers: Iterable[Worker], now: float) -> None:
        """These are the processes that the launcher runs. Others are lost, unless they live."""
        runs = {one.launch_id: one for one in launched}
        here = {*runs, *(w.launch_id for w in workers)}
        self.launches = {k: v for k, v in self.launches.items() if k in here}
        for one in runs.values():
            if one.launch_id not in self.launches:
                self._adopt(one, now)

    def _adopt(self, one: Launched, now: float) -> None:
        """It ran before this coordinator did."""
        number = re.search(r"(?a)-(\d{1,9})$", one.launch_id)
        order = int(number[1]) if number else self._num_launched[one.role]
        self._num_launched[one.role] = max(self._num_launched[one.role], order + 1)
        hello_by = now + max(HELLO_AGAIN_S, self._start_timeout_s - one.age_s)
        launch = Launch(one.launch_id, one.role, order, self._lineage(one.role), hello_by)
        launch.stopping = one.stopping
        self.launches[one.launch_id] = launch

    def overdue(self, workers: Iterable[Worker], now: float) -> list[Launch]:
        """Processes that have not said Hello in time."""
        return [launch for launch in self._awaited(workers) if launch.hello_by <= now]

    def _awaited(self, workers: Iterable[Worker]) -> list[Launch]:
        """Processes that have not said Hello yet."""
        born = {w.launch_id for w in workers}
        launches = self.launches.values()
        return [x for x in launches if not x.stopping and x.launch_id not in born]

    def due(self, workers: Iterable[Worker], can_start: bool) -> float | None:
        """When `overdue` has something to do, or `start_missing`, if it can be asked."""
        hellos = [launch.hello_by for launch in self._awaited(workers)]
        restarts = [restart.due for restart in self._restarts] if can_start else []
        return min([*hellos, *restarts], default=None)

    def _present(self, role: Role, workers: list[Worker]) -> list[Launch | Worker]:
        """Launches under way (the newest first), then ready workers (the newest first).

        A worker started by hand has no launch and counts all the same.
        """
        unborn = [launch for launch in self._awaited(workers) if launch.role == role]
        ready = [w for w in workers if w.role == role and w.state == "ready"]
        unborn.sort(key=lambda launch: -launch.order)
        ready.sort(key=lambda worker: -worker.order)
        return [*unborn, *ready]

    def _lineage(self, role: Role) -> Lineage:
        return Lineage(role, RestartPolicy(self._max_restarts))

    def _launch(self, lineage: Lineage, now: float, is_planned: bool) -> Launch:
        role = lineage.role
        order = self._num_launched[role]
        self._num_launched[role] += 1
        hello_by = now + self._start_timeout_s
        launch = Launch(f"{role}-{order}", role, order, lineage, hello_by, is_planned)
        self.launches[launch.launch_id] = launch
        return launch
