"""What a prefill worker's time goes to and what it has done, as its state shows it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from prefill_worker.handoffs import Handoffs
from prefill_worker.scheduler import PrefillScheduler
from splitserve.profiling.evidence import Evidence, Phase, SlotLimit
from splitserve.profiling.recorder import Step
from splitserve.scheduling.chunking import Planned
from splitserve.scheduling.sequence import Sequence
from splitserve.wire.messages import WorkerStats


@dataclass(slots=True)
class Account:
    """Owns what the worker has done since its start."""

    scheduler: PrefillScheduler
    handoffs: Handoffs
    max_num_batched_tokens: int
    num_tokens: int = 0
    num_kv_bytes: int = 0
    num_steps: int = 0
    num_prefix_queries: int = 0  # tokens of prompts that began
    num_prefix_hits: int = 0  # of these, those that were cached

    def step_of(self, plan: list[Planned]) -> Step:
        """The step of this plan: its slots are tokens."""
        num_tokens, most = sum(chunk.num_tokens for chunk in plan), self.max_num_batched_tokens
        limit: SlotLimit = "no_request"
        if num_tokens >= most:
            limit = "cap"
        elif self.scheduler.num_waiting:  # for blocks, which others hold until they are handed over
            limit = "waiting_for_kv" if self.handoffs.num_shipping else "no_blocks"
        num_used = self.scheduler.blocks.counts.used
        return Step(num_tokens, 0, num_tokens, most, limit, num_used)

    def began(self, sequence: Sequence) -> None:
        """A prompt has its blocks, and is computed behind what was cached of it."""
        self.num_prefix_queries += len(sequence.token_ids)
        self.num_prefix_hits += sequence.num_cached

    @property
    def waits_for(self) -> Phase:
        """What a blocked loop waits for: KV that is to go out, or work."""
        return "kv_wait" if self.handoffs.num_shipping else "wait"

    def stats(self, evidence: Evidence | None) -> WorkerStats:
        counts = self.scheduler.blocks.counts
        return WorkerStats(
            num_blocks_total=counts.total,
            num_blocks_free=counts.free,
            num_blocks_used=counts.used,
            num_blocks_cached=counts.cached,
            num_blocks_reserved=counts.reserved,
            num_requests_running=self.scheduler.num_computing,
            num_requests_waiting=self.scheduler.num_waiting,
            num_transfers_in_flight=self.handoffs.num_in_flight,
            num_tokens_prefilled=self.num_tokens,
            num_kv_bytes_sent=self.num_kv_bytes,
            num_steps=self.num_steps,
            num_prefix_queries=self.num_prefix_queries,
            num_prefix_hits=self.num_prefix_hits,
            evidence=evidence,
        )
