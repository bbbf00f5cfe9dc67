"""The moments of one request, named once. Every time we report is a difference of two of them.

    received ─► dispatched ─► prefill started ─► prefill ended ─► first token delivered
       └──────── queue_s ──────────┘ └─ prefill_s ──┘ └── delivery_s ──┘   = ttft_s

    first token ─► KV granted ─► committed ─► first step ─► second token
       └ grant_wait_s ┘ └ transfer_s ┘ └ decode_wait_s ┘ └ first_step_s ┘   = handoff_gap_s

Each part is measured by the process in which it passes, and only durations travel; delivery is what
is left of the coordinator's own time, the ways of messages included. In the second sum the ways of
the two tokens cancel out, but for a difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from splitserve.wire.parts import Begun, HandoffTimes


@dataclass(slots=True)
class Timeline:
    """What happened to a request when, on one monotonic clock, and what workers reported of it.

    Parts are those of the attempt that brought the token they end with; of any other they stay
    None.
    """

    arrived_at: float  # at the HTTP server, before its body was read
    dispatched_at: float | None = None
    first_token_at: float | None = None
    first_sent_at: float | None = None  # the first bytes of a stream went out
    second_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None
    worker_queue_s: float | None = None  # from the prompt's arrival at a worker to its first step
    prefill_s: float | None = None
    handoff: HandoffTimes | None = None
    begun: Begun | None = None
    num_kv_bytes: int | None = None
    prefill_worker_id: str | None = None  # the decode worker itself when it prefills locally
    decode_worker_id: str | None = None
    attempt: int = 0  # the one whose prompt brings the first token, as it is called now
    is_local: bool = False  # that attempt hands nothing over

    # -- what happens -------------------------------------------------------------------------

    def dispatched(
        self, prefill_worker_id: str, decode_worker_id: str, attempt: int, now: float
    ) -> None:
        """An attempt goes to workers. What was known of the one before is no part of it."""
        self.prefill_worker_id, self.decode_worker_id = prefill_worker_id, decode_worker_id
        if self.first_token_at is None:
            self.dispatched_at, self.attempt = now, attempt
            self.is_local = prefill_worker_id == decode_worker_id
            self.worker_queue_s = self.prefill_s = None
        if self.second_token_at is None:
            self.handoff = self.begun = None

    def retargeted(self, old_attempt: int, attempt: int, decode_worker_id: str) -> None:
        """The same prompt, computed or not, goes to another decode worker."""
        self.decode_worker_id = decode_worker_id
        if self.attempt == old_attempt:
            self.attempt = attempt

    def prompt_computed(self, attempt: int, queued_s: float, prefill_s: float) -> None:
        if attempt == self.attempt and self.prefill_s is None:
            self.worker_queue_s, self.prefill_s = max(0.0, queued_s), max(0.0, prefill_s)

    def handed_over(self, attempt: int, num_kv_bytes: int, times: HandoffTimes | None) -> None:
        if attempt == self.attempt and self.handoff is None:
            self.num_kv_bytes, self.handoff = num_kv_bytes, times

    def decode_began(self, attempt: int, begun: Begun) -> None:
        """Comes with the tokens of that step, ahead of `tokens_delivered`."""
        if attempt == self.attempt and self.second_token_at is None:
            self.begun = begun

    def tokens_delivered(self, last_index: int, now: float) -> None:
        """Output tokens up to `last_index` of some choice went to the client."""
        if self.first_token_at is None:
            self.first_token_at = now
        if self.second_token_at is None and last_index >= 1:
            self.second_token_at = now
        self.last_token_at = now

    def finished(self, now: float) -> None:
        if self.finished_at is None:
            self.finished_at = now

    # -- how long it took ---------------------------------------------------------------------

    @property
    def queue_s(self) -> float | None:
        """Waiting in the coordinator and then in the worker, before anything was computed."""
        return _sum(_between(self.arrived_at, self.dispatched_at), self.worker_queue_s)

    @property
    def delivery_s(self) -> float | None:
        """From the end of prefill until the client was sent something, and the Prefill's way."""
        at_workers = _sum(self.worker_queue_s, self.prefill_s)
        return (
            None if at_workers is None else _between(self.dispatched_at, self._shown_at, at_workers)
        )

    @property
    def ttft_s(self) -> float | None:
        return _between(self.arrived_at, self._shown_at)

    @property
    def handoff_gap_s(self) -> float | None:
        """Between tokens 0 and 1: what a hand-off costs the reader."""
        return None if self.is_local else _between(self.first_token_at, self.second_token_at)

    @property
    def grant_wait_s(self) -> float | None:
        return None if self.handoff is None else self.handoff.grant_wait_s

    @property
    def transfer_s(self) -> float | None:
        """As the prefill worker measured it, which includes the way back of Received, and what
        went on before the first token was delivered: neither is in the gap."""
        if self.handoff is None:
            return None
        others = _sum(self.handoff.grant_wait_s, _sum(self.decode_wait_s, self.first_step_s))
        rest = _between(self.first_token_at, self.second_token_at, others or 0.0)
        measured = self.handoff.transfer_s
        return measured if others is None or rest is None else min(measured, rest)

    @property
    def decode_wait_s(self) -> float | None:
        return None if self.begun is None else self.begun.decode_wait_s

    @property
    def first_step_s(self) -> float | None:
        return None if self.begun is None else self.begun.first_step_s

    @property
    def kv_transfer_s(self) -> float | None:
        """All of it, from Grant to Received."""
        return None if self.handoff is None else self.handoff.kv_transfer_s

    @property
    def awaits_handoff(self) -> bool:
        """A prefill worker that is in a step tells of its hand-off behind it."""
        return self.begun is not None and self.handoff is None

    @property
    def decode_s(self) -> float | None:
        return _between(self.first_token_at, self.last_token_at)

    @property
    def inference_s(self) -> float | None:
        """From the prompt's first forward pass to the last token."""
        if self.worker_queue_s is None:
            return None
        return _between(self.dispatched_at, self.last_token_at, self.worker_queue_s)

    @property
    def e2e_s(self) -> float | None:
        """Until the last token was there, or out, where that was the first one."""
        end = self.finished_at
        if end is not None and self.first_sent_at is not None:
            end = max(end, self.first_sent_at)
        return _between(self.arrived_at, end)

    def report(self) -> dict[str, Any]:
        """As `return_timing` shows it; null for what did not happen or is not known."""
        return {
            "queue_s": self.queue_s,
            "prefill_s": self.prefill_s,
            "delivery_s": self.delivery_s,
            "ttft_s": self.ttft_s,
            "handoff_gap_s": self.handoff_gap_s,
            "grant_wait_s": self.grant_wait_s,
            "transfer_s": self.transfer_s,
            "decode_wait_s": self.decode_wait_s,
            "first_step_s": self.first_step_s,
            "kv_transfer_s": self.kv_transfer_s,
            "num_kv_bytes": self.num_kv_bytes,
            "prefill_worker_id": self.prefill_worker_id,
            "decode_worker_id": self.decode_worker_id,
            "e2e_s": self.e2e_s,
            "moments": self.moments(),
        }

    def moments(self) -> dict[str, float | None]:
        """Seconds from the arrival to each moment, in order; null for what did not happen.

        Moments at workers are laid end to end, so they are early by the way of messages.
        """
        dispatched = _between(self.arrived_at, self.dispatched_at)
        started = _sum(dispatched, self.worker_queue_s)
        ended = _sum(started, self.prefill_s)
        return {
            "received": 0.0,
            "dispatched": dispatched,
            "prefill_started": started,
            "prefill_ended": ended,
            **self._handoff_moments(ended),
            "first_token_delivered": self.ttft_s,
            "second_token_delivered": _between(self.arrived_at, self.second_token_at),
            "finished": self.e2e_s,
        }

    def _handoff_moments(self, prefill_ended: float | None) -> dict[str, float | None]:
        granted = first_byte = last_byte = committed = first_step = None
        transfer_s = self.transfer_s
        if prefill_ended is not None and (handoff := self.handoff) and transfer_s is not None:
            committed = prefill_ended + handoff.grant_wait_s + transfer_s
            granted = max(0.0, committed - handoff.kv_transfer_s)  # often before prefill ended
            first_byte = granted + handoff.first_byte_s
            last_byte = granted + handoff.last_byte_s
            first_step = None if self.begun is None else committed + self.begun.decode_wait_s
        return {
            "kv_granted": granted,
            "first_kv_byte": first_byte,
            "last_kv_byte": last_byte,
            "committed": committed,
            "first_decode_step": first_step,
        }

    @property
    def _shown_at(self) -> float | None:
        """When the first token went out: of an answer in one piece, when it was there."""
        return self.first_token_at if self.first_sent_at is None else self.first_sent_at


def _between(start: float | None, end: float | None, less: float = 0.0) -> float | None:
    """Clocks of two hosts may drift apart by a little; nothing lasts less than nothing."""
    return None if start is None or end is None else max(0.0, end - start - less)


def _sum(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first + second
