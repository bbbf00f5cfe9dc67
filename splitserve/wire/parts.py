"""What messages are made of, beside what requests and configs are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from splitserve.config import Fingerprint, KVLayout, Role

HEARTBEAT_SUFFIX = b"/heartbeat"  # behind a worker's identity: that of its heartbeat's socket
Stage = Literal["admission", "prefill", "transfer", "decode", "deadline", "internal"]


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker can do and what it serves; fixed for its life."""

    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    layout: KVLayout
    fingerprint: Fingerprint
    num_threads: int
    device: str


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """A worker's state at one moment, as GET /cluster shows it."""

    num_blocks_total: int = 0
    num_blocks_free: int = 0
    num_blocks_used: int = 0
    num_blocks_cached: int = 0
    num_blocks_reserved: int = 0
    num_blocks_quarantined: int = 0
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_transfers_in_flight: int = 0
    num_tokens_prefilled: int = 0
    num_tokens_decoded: int = 0
    num_kv_bytes_sent: int = 0
    num_kv_bytes_received: int = 0
    num_preemptions: int = 0
    num_frames_dropped: int = 0
    num_steps: int = 0


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a request's KV: layers [layer_start, layer_end), tokens [token_start, token_end),
    KV heads [head_start, head_end). Tokens are numbered within the request."""

    layer_start: int
    layer_end: int
    token_start: int
    token_end: int
    head_start: int
    head_end: int


@dataclass(frozen=True, slots=True)
class Held:
    """One attempt at a request that a worker holds something of."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Launched:
    """A worker process that the launcher runs."""

    launch_id: str
    role: Role
    age_s: float = 0.0  # how long ago it was started
    stopping: bool = False  # it was told to leave
