"""Profiles that run: what observed workers tell and which requests end, as lines of NDJSON.

    begin ──── duration_s ────► ends_at ─ GRACE_S ─► closes_at ── MAX_READ_S ──► cut off
          workers tell               the last of it           the client reads

A profile has a bound: a client that reads too slowly loses lines, and hears how many.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from coordinator.events import Send
from coordinator.registry import Worker
from splitserve.errors import OverloadedError
from splitserve.profiling.step_log import COLUMNS
from splitserve.timeline import Timeline
from splitserve.wire import messages as m

MAX_WAITING = 100_000  # rows and other entries that wait for a client; 80 MB
MAX_PROFILES = 4  # that run at once
GRACE_S = 1.5  # for what workers still have to tell when the time is over
MAX_READ_S = 60.0  # for a client to read what waits then
_ENDED_AT = COLUMNS.index("ended_at")

Line = dict[str, Any]


@dataclass(slots=True, eq=False)
class Profile:
    """Owns what one client of a profile has not read yet."""

    began_at: float
    order: m.Observe
    head: Line
    worker_ids: set[str]  # who was told to tell
    num_lost: int = 0
    num_waiting: int = 0
    lines: asyncio.Queue[Line] = field(default_factory=asyncio.Queue)

    @property
    def ends_at(self) -> float:
        return self.began_at + self.order.duration_s

    @property
    def closes_at(self) -> float:
        return self.ends_at + GRACE_S

    @property
    def longest_s(self) -> float:
        """How long its answer may take."""
        return self.order.duration_s + GRACE_S + MAX_READ_S

    def tell(self, line: Line) -> None:
        num_entries = _num_entries(line)
        if self.num_waiting + num_entries > MAX_WAITING:
            self.num_lost += num_entries
            return
        self.num_waiting += num_entries
        self.lines.put_nowait(line)

    async def next(self, timeout_s: float) -> Line | None:
        """The next line; None when there is none in time."""
        if self.lines.empty():
            try:
                async with asyncio.timeout(timeout_s):
                    line = await self.lines.get()
            except TimeoutError:
                return None
        else:
            await asyncio.sleep(0)  # who reads quickly must not have the event loop for itself
            line = self.lines.get_nowait()
        self.num_waiting -= _num_entries(line)
        return line


class Profiles:
    """Owns the profiles that run."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running: set[Profile] = set()

    def begin(self, order: m.Observe, workers: Sequence[Worker], start: Line) -> Profile:
        """A profile of `workers`, whom the caller tells. `end` must follow.

        Raises OverloadedError when as many profiles run as may.
        """
        if len(self._running) >= MAX_PROFILES:
            raise OverloadedError(f"{MAX_PROFILES} profiles are running, and more may not")
        head = {"type": "start", "duration_s": order.duration_s, **start}
        head |= {"columns": COLUMNS, "workers": [*map(facts_line, workers)]}
        worker_ids = {worker.worker_id for worker in workers}
        profile = Profile(self._clock(), order, head, worker_ids)
        self._running.add(profile)
        return profile

    def end(self, profile: Profile) -> bool:
        """Its client has all of it, or is gone. Whether nobody looks any more."""
        self._running.discard(profile)
        return not self._open()

    async def lines(self, profile: Profile) -> AsyncIterator[Line]:
        """Everything of a profile, from its start to its end."""
        yield profile.head
        while line := await profile.next(profile.closes_at - self._clock()):
            yield line
            if line["type"] == "error":
                return
        observed_s = min(self._clock(), profile.ends_at) - profile.began_at
        yield {"type": "end", "at": observed_s, "num_lost": profile.num_lost}

    def give_up(self, reason: str) -> None:
        """No profile goes on: each ends with an error, behind what waits."""
        for profile in self._running:
            profile.lines.put_nowait({"type": "error", "error": {"message": reason}})

    def newcomers(self, workers: Iterable[Worker]) -> list[Send]:
        """What to tell those of `workers` that joined while profiles run."""
        now = self._clock()
        sends = []
        for profile in self._running:
            left_s = profile.ends_at - now
            for worker in workers if left_s > 0 else ():
                if worker.worker_id not in profile.worker_ids:
                    profile.worker_ids.add(worker.worker_id)
                    profile.tell({"type": "worker", **facts_line(worker)})
                    sends.append(Send(worker.identity, replace(profile.order, duration_s=left_s)))
        return sends

    def observed(self, message: m.Observed) -> bool:
        """What a worker told of itself; a profile has none of what was before it began. Whether
        anybody looks."""
        now = self._clock()
        open_profiles = self._open()
        for profile in open_profiles:
            at = now - profile.began_at
            profile.num_lost += message.num_lost
            if rows := _rows_since(message.rows, at):
                profile.tell({"type": "steps", "worker_id": message.worker_id, "rows": rows})
            for window in (window for window in message.windows if window.age_s <= at):
                evidence = asdict(window.evidence)
                told = {"at": at - window.age_s, "evidence": evidence}
                profile.tell({"type": "window", "worker_id": message.worker_id, **told})
            kernels = [kernel for kernel in message.kernels if kernel.age_s <= at]
            if events := [[k.name, at - k.age_s, k.duration_s] for k in kernels]:
                profile.tell({"type": "kernels", "worker_id": message.worker_id, "events": events})
        return bool(open_profiles)

    def finished(self, timeline: Timeline) -> None:
        """A request came to its end."""
        for profile in self._open():
            at = timeline.arrived_at - profile.began_at
            profile.tell({"type": "request", "at": at, "timing": timeline.report()})

    def _open(self) -> list[Profile]:
        """Those that take what is told."""
        now = self._clock()
        return [profile for profile in self._running if now < profile.closes_at]


def _num_entries(line: Line) -> int:
    return len(line.get("rows") or line.get("events") or "1")


def facts_line(worker: Worker) -> Line:
    """What a profile says of a worker, once."""
    facts = worker.facts
    return {
        "worker_id": worker.worker_id,
        "role": worker.role,
        "host": worker.host,
        "device": facts.device,
        "num_cores": facts.num_cores,
        "num_threads": facts.num_threads,
        "max_num_seqs": facts.max_num_seqs,
        "max_num_batched_tokens": facts.max_num_batched_tokens,
        "num_blocks_total": facts.num_blocks,
        **({} if facts.ceilings is None else asdict(facts.ceilings)),
        "weight_bytes": facts.weight_bytes,
        "weight_bytes_per_number": facts.weight_bytes_per_number,
        "kv_token_bytes": facts.layout.token_bytes,
        "kv_int8_token_bytes": replace(facts.layout, dtype="int8").token_bytes,
        "transport": facts.transport,
    }


def _rows_since(rows: Iterable[Sequence[float]], at: float) -> list[list[float]]:
    """`ended_at` becomes seconds since the profile began; what ended before is not part of it."""
    found = []
    for values in map(list, rows):
        if len(values) == len(COLUMNS):
            values[_ENDED_AT] = at - values[_ENDED_AT]
            if values[_ENDED_AT] < 0:
                continue
        found.append(values)
    return found
