"""Why a prompt can't be taken, ever or here. Pure; peers may send anything."""

from __future__ import annotations

from dataclasses import dataclass

from splitserve.config import KVLayout
from splitserve.scheduling.sequence import Request
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


def impossible(request: Request, max_model_len: int, vocab_size: int) -> str | None:
    """Why the request could never be served here, by its numbers."""
    num_tokens = len(request.token_ids)
    choice_ids = [choice.choice_id for choice in request.choices]
    if not choice_ids or len(set(choice_ids)) != len(choice_ids):
        return f"choice ids {choice_ids[:10]} are none, or not distinct"
    if not 0 < request.num_prompt_tokens <= num_tokens < max_model_len:
        return f"{num_tokens} tokens do not fit in max_model_len {max_model_len}"
    token_ids = [*request.token_ids, *(token_id for token_id, _ in request.sampling.logit_bias)]
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        return f"a token id is outside the vocabulary of {vocab_size}"
    return None
