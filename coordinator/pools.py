"""How many workers there should be, and the processes the launcher was asked to run for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.registry import Worker
from splitserve.config import MAX_WORKERS, ROLES, Role
from splitserve.errors import InvalidRequestError


@dataclass(slots=True, eq=False)
class Launch:
    """A process the launcher was asked to start and has not seen to exit."""

    launch_id: str
    role: Role
    order: int
    stopping: bool = False


class Pools:
    """Owns the target counts and the launches."""

    def __init__(self, num_prefill: int, num_decode: int) -> None:
        self.targets: dict[Role, int] = {"prefill": num_prefill, "decode": num_decode}
        self.launches: dict[str, Launch] = {}
        self._num_launched: dict[Role, int] = {"prefill": 0, "decode": 0}

    def retarget(self, prefill: int, decode: int) -> None:
        """Raises InvalidRequestError for numbers that can't be."""
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

    def complete(self, workers: Iterable[Worker]) -> bool:
        """Whether every worker asked for is ready."""
        ready = [w.role for w in workers if w.state == "ready"]
        return all(ready.count(role) >= self.targets[role] for role in ROLES)

    def start_missing(self, workers: Iterable[Worker]) -> list[Launch]:
        """New launches, so that with those under way every pool has its target."""
        known = list(workers)
        started = []
        for role in ROLES:
            missing = self.targets[role] - len(self._present(role, known))
            started += [self._launch(role) for _ in range(missing)]
        return started

    def surplus(self, workers: Iterable[Worker]) -> list[Launch | Worker]:
        """What is over target, newest first: launches not up yet, then workers."""
        known = list(workers)
        over: list[Launch | Worker] = []
        for role in ROLES:
            present = self._present(role, known)
            over += present[: max(0, len(present) - self.targets[role])]
        return over

    def forget_unborn(self, workers: Iterable[Worker]) -> None:
        """A new launcher came: what the old one was asked for and never said Hello is lost."""
        born = {w.launch_id for w in workers}
        self.launches = {k: v for k, v in self.launches.items() if k in born}

    def _present(self, role: Role, workers: list[Worker]) -> list[Launch | Worker]:
        """Launches under way (the newest first), then ready workers (the newest first).

        A worker started by hand has no launch and counts all the same.
        """
        said_hello = {w.launch_id for w in workers}
        unborn = [
            launch
            for launch in self.launches.values()
            if launch.role == role and not launch.stopping and launch.launch_id not in said_hello
        ]
        ready = [w for w in workers if w.role == role and w.state == "ready"]
        unborn.sort(key=lambda launch: -launch.order)
        ready.sort(key=lambda worker: -worker.order)
        return [*unborn, *ready]

    def _launch(self, role: Role) -> Launch:
        order = self._num_launched[role]
        self._num_launched[role] += 1
        launch = Launch(f"{role}-{order}", role, order)
        self.launches[launch.launch_id] = launch
        return launch
