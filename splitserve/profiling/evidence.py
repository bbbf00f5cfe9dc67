"""What a worker measures of itself, second by second, and the names of what may bind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# The parts of a loop's time. They follow each other without a hole, so they add up to it.
Phase = Literal[
    "wait",  # blocked with nothing to compute
    "kv_wait",  # the same, while KV of computed prompts is on its way
    "receive",  # taking messages
    "schedule",  # deciding what to compute
    "prepare",  # making the tensors of a step
    "forward",  # the model
    "sample",  # drawing tokens
    "send",  # taking tokens, telling others, shipping KV
    "other",  # what none of these names fits: statistics, checks, calls between the parts of a step
]
HOST_PHASES: tuple[Phase, ...] = ("receive", "schedule", "prepare", "sample", "send", "other")
PHASES: tuple[Phase, ...] = ("wait", "kv_wait", "forward", *HOST_PHASES)

# Why a batch had no more: it was full, nobody waited, no KV blocks were free, or those who would
# have joined waited for their KV.
SlotLimit = Literal["cap", "no_request", "no_blocks", "waiting_for_kv"]
SLOT_LIMITS: tuple[SlotLimit, ...] = ("cap", "no_request", "no_blocks", "waiting_for_kv")

Bottleneck = Literal["compute", "memory", "kernels", "host", "batching", "transfer", "idle"]
BOTTLENECKS: tuple[Bottleneck, ...] = (
    "compute",
    "memory",
    "kernels",
    "host",
    "batching",
    "transfer",
    "idle",
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """One window of a worker's loop: about a second, longer where a step or a wait was longer.

    Slots are sequences on a decode worker and tokens on a prefill worker. Sums run over the
    window's steps; seconds by limit are seconds of forward passes.
    """

    window: int = 0  # its number in the worker's life, from 1
    window_s: float = 0.0
    num_steps: int = 0
    # phases, seconds
    wait_s: float = 0.0
    kv_wait_s: float = 0.0
    receive_s: float = 0.0
    schedule_s: float = 0.0
    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    send_s: float = 0.0
    other_s: float = 0.0
    # the batch
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_slots_used: int = 0
    num_slots_allowed: int = 0
    cap_s: float = 0.0
    no_request_s: float = 0.0
    no_blocks_s: float = 0.0
    waiting_for_kv_s: float = 0.0
    full_batch_gain: float = 1.0  # work per second by the roofs: of full batches over these
    num_kv_blocks_used: float = 0.0  # mean over steps
    # the roofs
    num_bytes: int = 0
    num_flops: int = 0
    memory_floor_s: float = 0.0  # the bytes at the copy bandwidth
    compute_floor_s: float = 0.0  # the FLOPs at the matmul peak
    floor_s: float = 0.0  # step by step the larger of the two
    bottleneck: Bottleneck = "idle"

    @property
    def host_s(self) -> float:
        """Work of the loop around forward passes."""
        return (
            self.receive_s
            + self.schedule_s
            + self.prepare_s
            + self.sample_s
            + self.send_s
            + self.other_s
        )

    @property
    def busy_s(self) -> float:
        return self.forward_s + self.host_s

    @property
    def efficiency(self) -> float:
        """Floor over forward time: 1 is as fast as the machine can be."""
        return self.floor_s / self.forward_s if self.forward_s else 0.0
