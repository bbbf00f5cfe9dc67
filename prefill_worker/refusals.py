"""Why a prefill worker can't take a prompt. Pure."""

from __future__ import annotations

from typing import Protocol

from prefill_worker.scheduler import PrefillScheduler
from splitserve.draining import Draining
from splitserve.membership import Membership
from splitserve.scheduling.sequence import Request, impossible
from splitserve.wire import messages as m

Refusal = tuple[str, bool]  # the reason, and whether another worker might take it


class Limits(Protocol):
    """What a runner can compute at all."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


def refusal(
    request: Request,
    message: m.Prefill,
    here: Membership,
    draining: Draining,
    scheduler: PrefillScheduler,
    runner: Limits,
) -> Refusal | None:
    """None when the prompt can be taken."""
    if message.epoch != here.epoch:
        return f"epoch is {here.epoch} here, not {message.epoch}", True
    if draining.started:
        return f"prefill worker {here.worker_id} is draining", True
    if reason := impossible(request, runner.max_model_len, runner.vocab_size):
        return reason, False
    if scheduler.never_fits(request):
        num_blocks = scheduler.blocks.counts.total
        return f"{len(request.token_ids)} tokens never fit in {num_blocks} blocks", False
    if message.decode_worker_id is None or message.decode_endpoint is None:
        return "Prefill without a decode worker", False
    return None
