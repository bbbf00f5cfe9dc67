"""How much a worker may have outstanding. Pure: its facts and its load in, yes or no out.

The window keeps a worker busy over one round trip and no longer: what waits beyond it waits in
the coordinator, where it can still go elsewhere, be cancelled, or be passed by a higher priority.
"""

from __future__ import annotations

from coordinator.tracked import Leg, Load
from splitserve.wire.messages import WorkerFacts

# Two steps' worth of prompt tokens: one being computed, one ready behind it.
NUM_STEPS_AHEAD = 2


def has_room_to_prefill(facts: WorkerFacts, load: Load, leg: Leg) -> bool:
    """Whether a worker may be given this prompt to compute. An idle one always may."""
    if load.num_requests == 0:
        return True
    num_tokens = len(leg.token_ids)
    num_blocks = load.num_prompt_blocks - (-num_tokens // facts.layout.block_size)
    return _prefill_window_open(facts, load, num_tokens) and num_blocks <= facts.num_blocks


def has_room_to_decode(facts: WorkerFacts, load: Load, leg: Leg) -> bool:
    """Whether a worker may be given this request to decode. An idle one always may."""
    if load.num_requests == 0:
        return True
    num_choices = leg.num_choices
    needed = len(leg.token_ids) // facts.layout.block_size + num_choices
    fits = load.num_decode_blocks + needed <= facts.num_blocks
    return fits and load.num_choices + num_choices <= facts.max_num_seqs


def has_room_for_both(facts: WorkerFacts, load: Load, leg: Leg) -> bool:
    """Whether a decode worker may be given this prompt to compute and to decode."""
    if not has_room_to_decode(facts, load, leg):
        return False
    return _prefill_window_open(facts, load, len(leg.token_ids))


def _prefill_window_open(facts: WorkerFacts, load: Load, num_tokens: int) -> bool:
    """The longest prompt counts as one step: short ones pass it in the worker, a chunk at a time,
    so they need not wait here for all of it."""
    step = facts.max_num_batched_tokens
    ahead = load.num_prompt_tokens - max(0, load.longest_prompt - step)
    return load.num_prompt_tokens == 0 or ahead + num_tokens <= NUM_STEPS_AHEAD * step
