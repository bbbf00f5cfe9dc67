"""Who is in the cluster: workers from their Hello to their death."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from coordinator.limits import Limits, limits_of
from splitserve.config import Liveness, Promises, Role
from splitserve.wire.messages import Heartbeat, Hello, WorkerFacts, WorkerStats

MAX_DEAD_SHOWN = 8


@dataclass(slots=True, eq=False)
class Worker:
    """One worker process that was welcomed."""

    worker_id: str
    role: Role
    launch_id: str
    pid: int
    host: str
    identity: bytes  # of its socket
    endpoint: str | None  # where its data socket is (decode)
    facts: WorkerFacts
    order: int  # the older has the smaller
    heartbeat_at: float
    state: Literal["ready", "draining", "dead"] = "ready"
    stats: WorkerStats = field(default_factory=WorkerStats)
    loop_age_s: float = 0.0
    death: str = ""
    drain_by: float | None = None
    told_to_stop: bool = False
    leaves_by_itself: bool = False  # somebody else told it to stop
    refuses: bool = False  # it turned work down; its next heartbeat says whether it drains
    to_be_replaced: bool = False  # in a rolling restart: others are given work first

    @property
    def can_stay(self) -> bool:
        """Whether it is leaving and has not heard of it."""
        return self.state == "draining" and not (self.told_to_stop or self.leaves_by_itself)


class Registry:
    """Owns the workers, the cluster's limits, and the judgement of who is alive.

    The first worker sets what the others must be like.
    """

    def __init__(
        self,
        liveness: Liveness,
        model_max_len: int,
        tokenizer: str,
        promises: Promises | None = None,
    ) -> None:
        """`tokenizer` is the fingerprint of the coordinator's own tokenizer; `promises` are those
        of the coordinator before this one."""
        self.workers: dict[str, Worker] = {}
        self.limits = None if promises is None else Limits.of(promises)
        self._liveness = liveness
        self._model_max_len = model_max_len
        self._tokenizer = tokenizer
        self._model: tuple[str, WorkerFacts] | None = None  # the first worker's id and facts
        self._num_joined = 0

    def takers(self, role: Role) -> list[Worker]:
        """Workers of a pool that may be given work."""
        return [w for w in self.workers.values() if w.role == role and w.state == "ready"]

    def alive(self) -> list[Worker]:
        return [w for w in self.workers.values() if w.state != "dead"]

    def refusal(self, hello: Hello) -> str | None:
        """Why a worker can't join, naming both sides; None when it can."""
        facts = hello.facts
        if facts is None or (hello.role == "decode" and not hello.endpoints):
            return f"the Hello of {hello.worker_id} lacks its facts or its endpoint"
        if hello.worker_id in self.workers:
            return f"{hello.worker_id} is already here, {self.workers[hello.worker_id].state}"
        if facts.fingerprint.tokenizer != self._tokenizer:
            return (
                f"{hello.worker_id} has tokenizer {facts.fingerprint.tokenizer}, "
                f"the coordinator has {self._tokenizer}"
            )
        if self._model is not None and (difference := self._difference(hello, facts)):
            return difference
        assert hello.role != "launcher"
        shortfall = self.limits.shortfall(hello.role, facts) if self.limits else None
        return shortfall and f"{hello.worker_id} is too small: {shortfall}"

    def _difference(self, hello: Hello, facts: WorkerFacts) -> str | None:
        assert self._model is not None
        first_id, first = self._model
        for name in ("layout", "fingerprint"):
            mine, theirs = getattr(facts, name), getattr(first, name)
            if mine != theirs:
                return f"{hello.worker_id} has {name} {mine}, {first_id} has {theirs}"
        return None

    def add(self, hello: Hello, identity: bytes, now: float) -> Worker:
        """Let a worker in; `refusal` was asked before."""
        assert hello.facts is not None and hello.role != "launcher"
        self._num_joined += 1
        worker = Worker(
            hello.worker_id,
            hello.role,
            hello.launch_id,
            hello.pid,
            hello.host,
            identity,
            hello.endpoints[0] if hello.endpoints else None,
            hello.facts,
            order=self._num_joined,
            heartbeat_at=now,
            stats=WorkerStats(
                num_blocks_total=hello.facts.num_blocks, num_blocks_free=hello.facts.num_blocks
            ),
        )
        self.workers[worker.worker_id] = worker
        self._model = self._model or (worker.worker_id, hello.facts)
        return worker

    def fix_limits(self) -> None:
        """The set of workers is complete for the first time: promise what they can do."""
        if self.limits is None:
            prefill = [w.facts for w in self.takers("prefill")]
            decode = [w.facts for w in self.takers("decode")]
            self.limits = limits_of(prefill, decode, self._model_max_len)

    def heard(self, heartbeat: Heartbeat, now: float) -> Worker | None:
        """A worker lives; None for one that isn't a living member."""
        worker = self.workers.get(heartbeat.worker_id)
        if worker is None or worker.state == "dead":
            return None
        worker.heartbeat_at = now
        worker.loop_age_s = heartbeat.loop_age_s
        worker.stats = heartbeat.stats
        worker.refuses = False
        return worker

    def by_identity(self, identity: bytes) -> Worker | None:
        return next((w for w in self.alive() if w.identity == identity), None)

    def forgive(self, paused_s: float) -> None:
        """Silence while we stood still is no news: others may have stood still with us."""
        for worker in self.alive():
            worker.heartbeat_at += paused_s

    def silent(self, now: float) -> list[tuple[Worker, str]]:
        """Workers that count as dead from now on, and why."""
        timeout_s = self._liveness.heartbeat_timeout_s
        found = []
        for worker in self.alive():
            if now - worker.heartbeat_at >= timeout_s:
                found.append((worker, f"no heartbeat for {timeout_s:g} s"))
            elif worker.loop_age_s > self._liveness.max_step_s:
                found.append((worker, f"its loop has been stuck for {worker.loop_age_s:.0f} s"))
        return found

    def bury(self, worker: Worker, reason: str) -> None:
        """A worker is dead. The last few stay visible."""
        worker.state, worker.death, worker.stats = "dead", reason, WorkerStats()
        dead = [w for w in self.workers.values() if w.state == "dead"]
        for old in dead[: max(0, len(dead) - MAX_DEAD_SHOWN)]:
            del self.workers[old.worker_id]

    def remove(self, worker: Worker) -> None:
        """A worker left as it was asked to."""
        worker.state = "dead"
        del self.workers[worker.worker_id]

    def due(self) -> float | None:
        """When the next worker counts as silent, unless it is heard."""
        timeout_s = self._liveness.heartbeat_timeout_s
        return min((w.heartbeat_at + timeout_s for w in self.alive()), default=None)
