"""What is measured of requests on their way: for /metrics, for the log, for profiles that run."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from coordinator.events import Deliver, NewRequest
from coordinator.output import Piece
from coordinator.profiles import Profiles
from coordinator.tickets import Call, Ticket
from splitserve.metrics import Metrics
from splitserve.timeline import Timeline
from splitserve.wire import messages as m

LATE_S = 10.0  # behind the end of an answer

log = logging.getLogger(__name__)


class _Late(NamedTuple):
    """Complete, but for the prefill worker's word, which is waited for until `due`."""

    timeline: Timeline
    due: float


class Measuring:
    """Owns what must be remembered of a request in order to count it, once."""

    def __init__(self, metrics: Metrics, profiles: Profiles) -> None:
        self._metrics = metrics
        self._profiles = profiles
        self._last_delivery: dict[tuple[str, int], float] = {}
        self._num_prompt_tokens: dict[str, int] = {}
        self._late: dict[str, _Late] = {}  # oldest first

    def accepted(self, requests: Sequence[NewRequest]) -> None:
        for request in requests:
            self._num_prompt_tokens[request.request_id] = len(request.token_ids)

    def heard(self, message: object) -> None:
        """A worker's message: of a hand-off it may come behind the end of the answer."""
        if isinstance(message, m.HandedOver) and message.times is not None:
            self._metrics.transferred(message.times.kv_transfer_s)
            late = self._late.get(message.request_id)
            if late is not None and late.timeline.attempt == message.attempt:
                del self._late[message.request_id]
                late.timeline.handed_over(message.attempt, message.num_kv_bytes, message.times)
                self._metrics.handoff_timed(late.timeline)

    def delivered(self, action: Deliver, piece: Piece) -> None:
        """Tokens of one choice went to its client."""
        if piece.tokens:
            key, now = (action.request_id, action.choice_id), time.monotonic()
            last = self._last_delivery.get(key)
            self._last_delivery[key] = now
            self._metrics.tokens_delivered(len(piece.tokens), None if last is None else now - last)

    def ended(self, ticket: Ticket) -> None:
        """By itself, by a failure, or because its client is gone."""
        for choice_id in ticket.outputs:
            self._last_delivery.pop((ticket.request_id, choice_id), None)
        num_prompt_tokens = self._num_prompt_tokens.pop(ticket.request_id)
        if ticket.timeline is None:
            self._metrics.ended(["abort"] * len(ticket.outputs))
            return
        self._metrics.ended(ticket.finish_reasons)
        self._metrics.counted(num_prompt_tokens, ticket.num_output_tokens)
        if ticket.timeline.awaits_handoff:
            due = time.monotonic() + LATE_S
            self._late[ticket.request_id] = _Late(ticket.timeline, due)
        else:
            self._metrics.handoff_timed(ticket.timeline)

    def answered(self, call: Call) -> None:
        """All but the end of the answer went out: what finished by itself is timed now, once."""
        for ticket in call.tickets:
            timeline, ticket.timeline = ticket.timeline, None
            if timeline is not None:
                self._metrics.timed(timeline)
                self._profiles.finished(timeline)
                if log.isEnabledFor(logging.DEBUG):
                    log.debug("%s", _line(ticket.request_id, timeline))

    def turned(self, now: float) -> None:
        """A hand-off is not waited for for ever: its prefill worker may have died."""
        while self._late and next(iter(self._late.values())).due <= now:
            self._metrics.handoff_timed(self._late.pop(next(iter(self._late))).timeline)


def _line(request_id: str, timeline: Timeline) -> str:
    """A request's moments, in order of time, as milliseconds from its arrival."""
    known = [(at, name) for name, at in timeline.moments().items() if at is not None]
    moments = ", ".join(f"{name} {1000 * at:.1f}" for at, name in sorted(known, key=itemgetter(0)))
    way = f"{timeline.prefill_worker_id} > {timeline.decode_worker_id}"
    return f"{request_id} by {way}, ms: {moments}"
