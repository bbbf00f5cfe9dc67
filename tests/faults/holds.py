"""What both roles' wrappers share: the pace of a step, the decision to hold, the wake-up call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from splitserve.engine.batch import Chunk
from splitserve.engine.model_runner import ModelRunner
from splitserve.request import SampledToken
from splitserve.scheduling.chunking import Planned
from splitserve.scheduling.sequence import Request, RequestKey
from tests.faults.pace import Pace, PaceFile

NUDGE_S = 0.02


@dataclass(frozen=True, slots=True)
class Nudge:
    """Posted to a worker's inbox now and then, so that its loop looks at the pace again."""


class Holds:
    """Owns which requests are held here, and tells the test once of each."""

    def __init__(self, pace: PaceFile, worker_id: str, role: str) -> None:
        self.pace = pace
        self.worker_id = worker_id
        self._role = role
        self._told: set[RequestKey] = set()

    def wants(self, request: Request, *points: int) -> bool:
        """Whether a request is to be held at one of these points. Later attempts never are."""
        is_first = request.key.attempt == 0
        return is_first and request.token_ids[0] in points and self.pace.read().holding

    def tell(self, request: Request, peer: str | None = None) -> None:
        """It is held now. `peer` is the decode worker it goes to, on the prefill side."""
        if request.key in self._told:
            return
        self._told.add(request.key)
        place = {"prefill": self.worker_id, "decode": peer}
        if self._role == "decode":
            place = {"prefill": None, "decode": self.worker_id}
        self.pace.mark(request.token_ids, **place)


def slow_down(runner: ModelRunner, holds: Holds, seconds: Callable[[], float]) -> None:
    """Make the steps of this runner obey the pace."""
    step = runner.step

    def paced(chunks: Sequence[Chunk]) -> list[tuple[SampledToken, ...]]:
        while holds.pace.read().frozen == holds.worker_id:
            time.sleep(NUDGE_S)
        if seconds() > 0:
            spend(seconds(), holds.pace.read().busy)
        poison = holds.pace.read().poison
        if any(chunk.token_ids[0] == poison for chunk in chunks):
            raise RuntimeError(f"token {poison} is poison")
        return step(chunks)

    runner.__dict__["step"] = paced


def slow_schedule(
    schedule: Callable[[], list[Planned]], holds: Holds
) -> Callable[[], list[Planned]]:
    """A scheduler that thinks for a while before each step."""

    def paced() -> list[Planned]:
        if plan := schedule():
            spend(holds.pace.read().schedule_s, busy=True)
        return plan

    return paced


def spend(seconds: float, busy: bool) -> None:
    """Wait, or keep the interpreter busy, as a step that never lets other threads run freely."""
    until = time.monotonic() + seconds
    if not busy:
        time.sleep(seconds)
    while time.monotonic() < until:
        pass


def nudge_for_ever(post: Callable[[object], Any]) -> None:
    """Wake the loop while the pace needs it, and when it changes; from a thread of its own."""
    pace, last = PaceFile.from_environment(), Pace()

    def run() -> None:
        nonlocal last
        while True:
            time.sleep(NUDGE_S)
            before, last = last, pace.read()
            if last != before or last.holding or last.frame_s:
                post(Nudge())

    threading.Thread(target=run, name="nudge", daemon=True).start()
