"""The moments of one request, named once. Every time we report is a difference of two of them.

arrived ──► dispatched ──► first token ──► second token ──► … ──► last token ──► finished
  └ waits here ┘ └ waits in the worker, then prefill ┘ └ hand-off gap ┘
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Timeline:
    """What happened to a request when, on one monotonic clock, and what workers reported of it."""

    arrived_at: float
    dispatched_at: float | None = None
    first_token_at: float | None = None
    second_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None
    worker_queue_s: float | None = None  # from the prompt's arrival at a worker to its first step
    prefill_s: float | None = None
    transfer_s: float | None = None
    num_kv_bytes: int | None = None
    prefill_worker_id: str | None = None  # the decode worker itself when it prefills locally
    decode_worker_id: str | None = None

    def tokens_delivered(self, last_index: int, now: float) -> None:
        """Output tokens up to `last_index` of some choice went to the client."""
        if self.first_token_at is None:
            self.first_token_at = now
        if self.second_token_at is None and last_index >= 1:
            self.second_token_at = now
        self.last_token_at = now

    @property
    def was_handed_over(self) -> bool:
        """Whether the KV went from one worker to another."""
        return self.prefill_worker_id != self.decode_worker_id

    @property
    def queue_s(self) -> float | None:
        """Waiting in the coordinator and then in the worker, before anything was computed."""
        waited = _between(self.arrived_at, self.dispatched_at)
        return None if waited is None else waited + (self.worker_queue_s or 0.0)

    @property
    def ttft_s(self) -> float | None:
        return _between(self.arrived_at, self.first_token_at)

    @property
    def handoff_gap_s(self) -> float | None:
        """Between tokens 0 and 1: what a hand-off costs the reader."""
        return _between(self.first_token_at, self.second_token_at)

    @property
    def e2e_s(self) -> float | None:
        return _between(self.arrived_at, self.finished_at)

    def report(self) -> dict[str, Any]:
        """As `return_timing` shows it; null for what did not happen or is not known."""
        return {
            "queue_s": self.queue_s,
            "prefill_s": self.prefill_s,
            "ttft_s": self.ttft_s,
            "handoff_gap_s": self.handoff_gap_s,
            "transfer_s": self.transfer_s,
            "num_kv_bytes": self.num_kv_bytes,
            "prefill_worker_id": self.prefill_worker_id,
            "decode_worker_id": self.decode_worker_id,
            "e2e_s": self.e2e_s,
        }


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
