"""`python -m tests.faults.prefill`: the real prefill worker, with faults around it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import prefill_worker.__main__ as entry
from prefill_worker.handoff import Action, Handoff
from prefill_worker.handoffs import Handoffs
from prefill_worker.worker import PrefillWorker
from splitserve.scheduling.chunking import Planned
from splitserve.scheduling.sequence import RequestKey
from splitserve.worker_process import run_role
from tests.faults.holds import NUDGE_S, Holds, Nudge, nudge_for_ever, slow_down, slow_schedule
from tests.faults.pace import (
    FRAME_BYTES,
    FRAMES,
    NUM_FRAMES_BEFORE,
    PREFILLING,
    RESERVED,
    UNCOMMITTED,
    PaceFile,
)


class HeldHandoffs(Handoffs):
    """Sends frames one by one where the pace asks for it, and holds some back."""

    def __init__(self, holds: Holds, *place: Any) -> None:
        super().__init__(*place)
        self._holds = holds
        self._num_sent: dict[RequestKey, int] = {}
        self._next_at: dict[RequestKey, float] = {}

    def pump(self, room_bytes: Callable[[str], int]) -> list[Action]:
        everything, actions = self._handoffs, []
        for request_id, handoff in everything.items():
            self._handoffs = {request_id: handoff}
            actions += self._pump_one(handoff, room_bytes)
        self._handoffs = everything
        return actions

    def sent(self, key: RequestKey, now: float) -> None:
        super().sent(key, now)
        self._num_sent[key] = self._num_sent.get(key, 0) + 1
        self._next_at[key] = time.monotonic() + self._holds.pace.read().frame_s

    def target_of(self, request_id: str) -> str | None:
        target = self._handoffs[request_id].target
        return None if target is None else target.worker_id

    def _pump_one(self, handoff: Handoff, room_bytes: Callable[[str], int]) -> list[Action]:
        request = handoff.request
        if handoff.state != "granted":
            return []
        if self._is_held(handoff) or time.monotonic() < self._next_at.get(request.key, 0.0):
            return []
        is_one_by_one = self._holds.wants(request, FRAMES) or self._holds.pace.read().frame_s
        room = (lambda _: FRAME_BYTES) if is_one_by_one else room_bytes
        if not self._holds.wants(request, UNCOMMITTED):
            return super().pump(room)
        first_tokens, handoff.first_tokens = handoff.first_tokens, None  # without them no Commit
        actions = super().pump(room)
        handoff.first_tokens = first_tokens
        if handoff.all_sent and first_tokens is not None:
            self._holds.tell(request, self.target_of(request.key.request_id))
        return actions

    def _is_held(self, handoff: Handoff) -> bool:
        request = handoff.request
        held = self._holds.wants(request, RESERVED) or (
            self._holds.wants(request, FRAMES)
            and self._num_sent.get(request.key, 0) >= NUM_FRAMES_BEFORE
        )
        if held:
            self._holds.tell(request, self.target_of(request.key.request_id))
        return held


class FaultyPrefillWorker(PrefillWorker):
    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        runner, channel, _, membership, _ = parts
        self._holds = Holds(PaceFile.from_environment(), membership.worker_id, "prefill")
        self._held_handoffs = HeldHandoffs(
            self._holds, membership.worker_id, runner.layout, FRAME_BYTES
        )
        self.handoffs = self._account.handoffs = self._held_handoffs
        slow_down(runner, self._holds, lambda: self._holds.pace.read().prefill_step_s)
        schedule = self.scheduler.schedule
        decide = slow_schedule(schedule, self._holds)
        self.scheduler.__dict__["schedule"] = lambda: self._without_held(decide())
        nudge_for_ever(channel.post)

    def take(self, event: object) -> None:
        if not isinstance(event, Nudge):
            super().take(event)

    def _without_held(self, plan: list[Planned]) -> list[Planned]:
        """Prompts that are held while they are computed lose their next chunk."""
        held = [
            chunk
            for chunk in plan
            if chunk.start > 0 and self._holds.wants(chunk.sequence.request, PREFILLING)
        ]
        for chunk in held:
            request = chunk.sequence.request
            self._holds.tell(request, self._held_handoffs.target_of(request.key.request_id))
        if held and len(held) == len(plan):
            time.sleep(NUDGE_S)  # the loop doesn't wait while it has prompts to compute
        return [chunk for chunk in plan if chunk not in held]


if __name__ == "__main__":
    vars(entry)["PrefillWorker"] = FaultyPrefillWorker
    sys.exit(run_role(entry.serve))
