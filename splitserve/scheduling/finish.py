"""When an answer ends, by token id and by length. Prefill and decode workers both call this.

Stop strings are the coordinator's: they need text, and text never reaches a worker.
"""

from __future__ import annotations

from splitserve.request import FinishReason, Sampling


def stop_ids(sampling: Sampling) -> frozenset[int]:
    """Token ids that end this request: its stop ids, and EOS unless it is ignored."""
    eos = () if sampling.ignore_eos else sampling.eos_token_ids
    return frozenset((*sampling.stop_token_ids, *eos))


def held_back_ids(sampling: Sampling) -> frozenset[int]:
    """Ids that can't be drawn before min_tokens: stop ids and EOS, ignored or not, as in vLLM."""
    return frozenset((*sampling.stop_token_ids, *sampling.eos_token_ids))


def finish_reason(sampling: Sampling, token_id: int, num_output_tokens: int) -> FinishReason | None:
    """Why the answer ends with `token_id` as its `num_output_tokens`-th token (from 1), or None.

    A stop id at a place below min_tokens can't be sampled (the sampler masks it); should it
    arrive anyway, it does not end the answer.
    """
    if num_output_tokens > sampling.min_tokens and token_id in stop_ids(sampling):
        return "stop"
    if num_output_tokens >= sampling.max_tokens:
        return "length"
    return None
