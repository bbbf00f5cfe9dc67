"""From a worker's rows to what a client gets of them. Pure."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

from coordinator.events import Deliver
from coordinator.tracked import Leg
from splitserve.wire import messages as m

log = logging.getLogger(__name__)


class Taken(NamedTuple):
    """What a row was good for."""

    delivery: Deliver | None
    num_wasted: int = 0  # tokens for a choice that had ended


def begun_of(message: m.Tokens) -> list[m.Begun]:
    """First steps that a message tells of; each lasted until the message was sent."""
    return [replace(one, first_step_s=one.first_step_s + message.unsent_s) for one in message.begun]


def take_row(leg: Leg, row: m.TokenRow, now: float) -> Taken:
    """Put a row's tokens in their place; what can be delivered now is."""
    if row.choice_id not in leg.choice_ids:
        log.warning("a row for choice %d, which nobody asked for", row.choice_id)
        return Taken(None)
    tracked = leg.tracked
    order = tracked.choices[row.choice_id]
    tokens, finish = order.take(row)
    if leg.all_sampled and leg.is_decoding:  # else it may hold a hand-off that ends unsaid
        del leg.phases[leg.decode_worker_id or ""]
    if row.choice_id in tracked.stopped:
        return Taken(None, len(tokens))
    if not tokens and finish is None:
        return Taken(None)
    tracked.delivered[row.choice_id] += [token.token_id for token in tokens]
    tracked.timeline.tokens_delivered(order.num_delivered - 1, now)
    return Taken(Deliver(tracked.request.request_id, row.choice_id, tokens, finish))
