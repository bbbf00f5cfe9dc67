"""`python -m tests.faults.decode`: the real decode worker, with faults around it."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import decode_worker.__main__ as entry
from decode_worker.worker import DecodeWorker
from kv_transfer.base import FrameDropped, FrameWritten, KVReceiver
from splitserve.membership import Membership
from splitserve.scheduling.chunking import Planned
from splitserve.scheduling.sequence import Sequence
from splitserve.wire import messages as m
from splitserve.worker_process import run_role
from tests.faults.holds import Holds, Nudge, nudge_for_ever, slow_down, slow_schedule
from tests.faults.pace import COMMITTED, DECODING, NUM_TOKENS_BEFORE, PaceFile
from tests.faults.rendezvous import address_through_shim


class FaultyDecodeWorker(DecodeWorker):
    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        runner, channel, receiver, membership, _ = parts
        self._holds = Holds(PaceFile.from_environment(), membership.worker_id, "decode")
        slow_down(runner, self._holds, lambda: self._holds.pace.read().decode_step_s)
        self._slow_writes(receiver)
        schedule = self.scheduler.schedule
        decide = slow_schedule(schedule, self._holds)
        self.scheduler.__dict__["schedule"] = lambda: self._without_held(decide())
        nudge_for_ever(channel.post)

    def take(self, event: object) -> None:
        if not isinstance(event, Nudge):
            super().take(event)

    def _without_held(self, plan: list[Planned]) -> list[Planned]:
        return [chunk for chunk in plan if not self._is_held(chunk.sequence)]

    def _is_held(self, sequence: Sequence) -> bool:
        request, num_tokens = sequence.request, sequence.num_output_tokens
        held = (num_tokens >= 1 and self._holds.wants(request, COMMITTED)) or (
            num_tokens >= NUM_TOKENS_BEFORE and self._holds.wants(request, DECODING)
        )
        if held:
            self._holds.tell(request)
        return held

    def _slow_writes(self, receiver: KVReceiver) -> None:
        accept, pace = receiver.accept, self._holds.pace

        def paced(header: m.FrameHeader, data: memoryview) -> FrameWritten | FrameDropped:
            time.sleep(pace.read().write_s)
            return accept(header, data)

        receiver.__dict__["accept"] = paced


class ShimmedMembership(Membership):
    """Tells the coordinator the address of a test's shim instead of its own, if there is one."""

    def join(self, facts: m.WorkerFacts, endpoints: tuple[str, ...] = ()) -> None:
        directory = PaceFile.from_environment().directory
        shimmed = tuple(address_through_shim(directory, os.getpid(), one) for one in endpoints)
        super().join(facts, shimmed)


if __name__ == "__main__":
    vars(entry)["DecodeWorker"] = FaultyDecodeWorker
    vars(entry)["Membership"] = ShimmedMembership
    sys.exit(run_role(entry.serve))
