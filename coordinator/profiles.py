"""Profiles that run: what observed workers tell and which requests end, as lines of NDJSON.

A profile has a bound: a client that reads too slowly loses lines, and hears how many.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from coordinator.registry import Worker
from splitserve.profiling.step_log import COLUMNS
from splitserve.timeline import Timeline
from splitserve.wire import messages as m

MAX_LINES = 10_000  # that wait for a client
GRACE_S = 1.5  # for what workers still have to tell when the time is over
_ENDED_AT = COLUMNS.index("ended_at")

Line = dict[str, Any]


@dataclass(slots=True, eq=False)
class Profile:
    """Owns what one client of a profile has not read yet."""

    began_at: float
    ends_at: float
    num_lost: int = 0
    lines: asyncio.Queue[Line] = field(default_factory=lambda: asyncio.Queue(MAX_LINES))

    def tell(self, line: Line) -> None:
        try:
            self.lines.put_nowait(line)
        except asyncio.QueueFull:
            self.num_lost += len(line.get("rows", ())) or 1


class Profiles:
    """Owns the profiles that run."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running: set[Profile] = set()

    async def lines(self, duration_s: float, start: Line) -> AsyncIterator[Line]:
        """Everything of a profile that begins now. Whoever calls this tells the workers."""
        now = self._clock()
        profile = Profile(now, now + duration_s)
        self._running.add(profile)
        try:
            yield {"type": "start", "duration_s": duration_s, **start, "columns": COLUMNS}
            while (left_s := profile.ends_at + GRACE_S - self._clock()) > 0:
                try:
                    yield await asyncio.wait_for(profile.lines.get(), left_s)
                except TimeoutError:
                    break
            observed_s = min(self._clock(), profile.ends_at) - profile.began_at
            yield {"type": "end", "at": observed_s, "num_lost": profile.num_lost}
        finally:
            self._running.discard(profile)

    def observed(self, message: m.Observed) -> None:
        """What a worker told of itself."""
        now = self._clock()
        for profile in self._running:
            at = now - profile.began_at
            profile.num_lost += message.num_lost
            if rows := [_since(row, at) for row in message.rows]:
                profile.tell({"type": "steps", "worker_id": message.worker_id, "rows": rows})
            for window in message.windows:
                evidence = asdict(window.evidence)
                told = {"at": at - window.age_s, "evidence": evidence}
                profile.tell({"type": "window", "worker_id": message.worker_id, **told})

    def finished(self, timeline: Timeline) -> None:
        """A request came to its end."""
        for profile in self._running:
            at = timeline.arrived_at - profile.began_at
            profile.tell({"type": "request", "at": at, "timing": timeline.report()})


def facts_lines(workers: Sequence[Worker]) -> list[Line]:
    """What the start of a profile says of each worker."""
    return [
        {
            "worker_id": worker.worker_id,
            "role": worker.role,
            "host": worker.host,
            "device": worker.facts.device,
            "num_threads": worker.facts.num_threads,
            "max_num_seqs": worker.facts.max_num_seqs,
            "max_num_batched_tokens": worker.facts.max_num_batched_tokens,
            "num_blocks_total": worker.facts.num_blocks,
            **({} if worker.facts.ceilings is None else asdict(worker.facts.ceilings)),
            "weight_bytes": worker.facts.weight_bytes,
            "kv_token_bytes": worker.facts.layout.token_bytes,
            "transport": worker.facts.transport,
        }
        for worker in workers
    ]


def _since(row: Sequence[float], at: float) -> list[float]:
    """A row whose `ended_at` is seconds since the profile began."""
    values = list(row)
    if len(values) == len(COLUMNS):
        values[_ENDED_AT] = at - values[_ENDED_AT]
    return values
