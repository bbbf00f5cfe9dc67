"""What a decode worker's time goes to and what it has done, as its state shows it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from decode_worker.answers import Answers
from decode_worker.intake import Intake
from decode_worker.scheduler import DecodeScheduler
from splitserve.profiling.evidence import Evidence, Phase, SlotLimit
from splitserve.profiling.recorder import Step
from splitserve.scheduling.chunking import Planned
from splitserve.wire.messages import WorkerStats


@dataclass(slots=True)
class Account:
    """Owns what the worker has done since its start."""

    scheduler: DecodeScheduler
    intake: Intake
    max_num_seqs: int
    max_num_batched_tokens: int
    num_kv_bytes: int = 0
    num_frames_dropped: int = 0
    num_steps: int = 0

    def step_of(self, plan: list[Planned]) -> Step:
        """The step of this plan: its slots are sequences."""
        num_tokens = num_decode = 0
        for chunk in plan:
            num_tokens += chunk.num_tokens
            num_decode += chunk.num_tokens == 1 and not chunk.sequence.is_prompt
        limit: SlotLimit = "no_request"
        if len(plan) >= self.max_num_seqs or num_tokens >= self.max_num_batched_tokens:
            limit = "cap"
        elif self.scheduler.num_preempted or (self.intake.num_waiting and self._has_seats):
            limit = "no_blocks"
        elif self.intake.num_late:
            limit = "waiting_for_kv"
        num_used = self.scheduler.blocks.counts.used
        tokens = num_tokens - num_decode, num_decode
        return Step(*tokens, len(plan), self.max_num_seqs, limit, num_used)

    @property
    def _has_seats(self) -> bool:
        """Whether more sequences could be taken: prompts that are still being computed have one."""
        num_taken = self.scheduler.num_choices + self.intake.num_granted_choices
        return num_taken < self.max_num_seqs

    @property
    def waits_for(self) -> Phase:
        """What a blocked loop waits for: KV of prompts that are computed, or work."""
        return "kv_wait" if self.intake.num_late else "wait"

    def stats(self, answers: Answers, evidence: Evidence | None) -> WorkerStats:
        counts = self.scheduler.blocks.counts
        return WorkerStats(
            num_blocks_total=counts.total,
            num_blocks_free=counts.free,
            num_blocks_used=counts.used,
            num_blocks_cached=counts.cached,
            num_blocks_reserved=counts.reserved,
            num_blocks_quarantined=counts.quarantined,
            num_requests_running=self.scheduler.num_running,
            num_requests_waiting=self.intake.num_waiting + self.scheduler.num_preempted,
            num_transfers_in_flight=self.intake.num_granted,
            num_tokens_prefilled=answers.num_tokens_prefilled,
            num_tokens_decoded=answers.num_tokens_decoded,
            num_kv_bytes_received=self.num_kv_bytes,
            num_preemptions=self.scheduler.num_preemptions,
            num_frames_dropped=self.num_frames_dropped,
            num_steps=self.num_steps,
            num_prefix_queries=answers.num_prefix_queries,
            num_prefix_hits=answers.num_prefix_hits,
            evidence=evidence,
        )
