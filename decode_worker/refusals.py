"""Why a prompt can't be taken, ever or here. Pure; peers may send anything."""

from __future__ import annotations

from dataclasses import dataclass

from splitserve.config import KVLayout
from splitserve.wire import messages as m

Refusal = tuple[str, bool]  # the reason, and whether another worker might take it


@dataclass(frozen=True, slots=True)
class Here:
    """Who a message should have been meant for."""

    worker_id: str
    epoch: str
    layout: KVLayout


def mismatch(message: m.Open | m.Prefill, here: Here) -> Refusal | None:
    """Why a message is not for this worker, in this coordinator's life; None when it is."""
    addressee, layout = here.worker_id, here.layout
    if isinstance(message, m.Open):
        addressee, layout = message.to_worker_id, message.layout
    if (addressee, message.epoch) != (here.worker_id, here.epoch):
        this = f"{here.worker_id} of epoch {here.epoch}"
        return f"meant for {addressee} of epoch {message.epoch}, this is {this}", True
    if layout != here.layout:
        return f"KV layout is {layout} there and {here.layout} here", False
    return None
