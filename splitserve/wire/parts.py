"""What messages are made of, beside what requests and configs are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from splitserve.config import Fingerprint, KVLayout, Role
from splitserve.profiling.evidence import Evidence
from splitserve.work import Ceilings

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
    ceilings: Ceilings | None = None
    weight_bytes: int = 0  # of the matrices a decode step reads
    transport: str = "tcp"
    num_cores: int = 0  # of its host, for all processes together; 0 is not known
    weight_bytes_per_number: int = 0  # of those matrices, as they are stored; 0 is not known


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
    num_prefix_queries: int = 0  # tokens of prompts that began here
    num_prefix_hits: int = 0  # of these, those that were cached
    evidence: Evidence | None = None  # of the last whole window


@dataclass(frozen=True, slots=True)
class ObservedWindow:
    """A window of a worker, and how long ago it ended."""

    age_s: float
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """One operation of a watched step: how long ago it began, and what it took."""

    name: str
    age_s: float
    duration_s: float


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
class HandoffTimes:
    """A hand-off as its prefill worker saw it, seconds. `grant_wait_s` and `transfer_s` follow each
    other, from the first token's leaving until all KV is at the decode worker."""

    grant_wait_s: float  # from the first token until the Grant came; 0 when it was there
    transfer_s: float  # from the later of the two until all is there
    kv_transfer_s: float  # from Grant to Received: it may begin long before the first token
    first_byte_s: float  # from the Grant to the first frame
    last_byte_s: float  # from the Grant to the last one


@dataclass(frozen=True, slots=True)
class Begun:
    """The first decode step of a request that was handed over, seconds."""

    request_id: str
    attempt: int
    decode_wait_s: float  # from the Commit's arrival until the step begins
    first_step_s: float  # from there until its tokens are sent


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
