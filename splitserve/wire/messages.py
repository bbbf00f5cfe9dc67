"""Every message of the protocol: data only, grouped by receiver. docs/protocol.md is the prose.

request_id and attempt name one try at one prompt; epoch names the coordinator's life. Durations
travel as seconds left (`deadline_s`, `stall_timeout_s`), never as timestamps. Tensors never ride
inside a message: a `FrameHeader` announces one raw buffer that follows it as its own ZeroMQ frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from splitserve.config import KVLayout, Promises, Role
from splitserve.request import Choice as Choice
from splitserve.request import Sampling as Sampling
from splitserve.request import TokenRow as TokenRow
from splitserve.wire.parts import Begun as Begun
from splitserve.wire.parts import HandoffTimes as HandoffTimes
from splitserve.wire.parts import Held as Held
from splitserve.wire.parts import KernelEvent as KernelEvent
from splitserve.wire.parts import Launched as Launched
from splitserve.wire.parts import ObservedWindow as ObservedWindow
from splitserve.wire.parts import Region as Region
from splitserve.wire.parts import Stage as Stage
from splitserve.wire.parts import WorkerFacts as WorkerFacts
from splitserve.wire.parts import WorkerStats as WorkerStats

# -- to a worker (control channel) -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answers Hello: the worker belongs to this coordinator's life, and forgets all it holds
    but `keep`."""

    epoch: str
    keep: tuple[Held, ...] = ()


@dataclass(frozen=True, slots=True)
class Reject:
    """Answers Hello: the worker does not fit this cluster; it exits, showing the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class HeartbeatAck:
    """Answers Heartbeat, on the heartbeat's own socket: the coordinator lives. Whoever hears
    another epoch than its own says Hello again."""

    epoch: str


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute a prompt. With a decode address the KV goes there; without, it stays (local)."""

    request_id: str
    attempt: int
    epoch: str
    token_ids: tuple[int, ...]  # prompt, then output already delivered (a re-submission)
    num_prompt_tokens: int
    choices: tuple[Choice, ...]
    sampling: Sampling
    deadline_s: float
    stall_timeout_s: float
    decode_worker_id: str | None = None
    decode_endpoint: str | None = None


@dataclass(frozen=True, slots=True)
class Retarget:
    """The decode worker of a prompt is gone or won't have it: hand what is here of it to this one.

    `attempt` is the new one; the prompt's KV, computed or not, stays as it is.
    """

    request_id: str
    attempt: int
    epoch: str
    decode_worker_id: str
    decode_endpoint: str


@dataclass(frozen=True, slots=True)
class Release:
    """Forget a request, up to this attempt, and free what it holds. Idempotent.

    For `deadline_s` a decode worker remembers it, so that nothing of it that comes later is taken.
    """

    request_id: str
    attempt: int
    epoch: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new work, finish what is there within `deadline_s`, exit with code 0."""

    epoch: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class PeerGone:
    """A worker is dead to the cluster. `reaped`: its process has ended, so it writes no more."""

    worker_id: str
    epoch: str
    reaped: bool


@dataclass(frozen=True, slots=True)
class Observe:
    """Tell every step and window for so long; 0 ends it. Answered by Observed, now and then.

    Of the next `num_kernel_steps` steps it tells every operation, which makes those slower.
    """

    epoch: str
    duration_s: float
    num_kernel_steps: int = 0


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget every cached block. What is in use stays until it is freed, and is not cached then."""

    epoch: str


# -- to the coordinator (control channel) ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a process, and again to a new coordinator. A worker says it after a real
    forward pass.

    role "launcher" carries no facts and no endpoints.
    """

    worker_id: str
    role: Literal["prefill", "decode", "launcher"]
    launch_id: str
    pid: int
    host: str
    endpoints: tuple[str, ...] = ()  # data sockets, one a rank (decode only; rank 0 speaks)
    facts: WorkerFacts | None = None
    held: tuple[Held, ...] = ()
    launches: tuple[Launched, ...] = ()  # of a launcher
    cluster_token: str = ""  # which the launcher gave to its own processes


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent by a thread of its own. `loop_age_s` is how long ago the worker's loop last turned.

    `draining`: it was told to stop, takes nothing new, and waits for Drain to leave.
    """

    worker_id: str
    epoch: str
    loop_age_s: float
    stats: WorkerStats
    draining: bool = False


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first output token of each choice, from whoever computed the prompt."""

    request_id: str
    attempt: int
    epoch: str
    rows: tuple[TokenRow, ...]
    queued_s: float  # from the Prefill's arrival to its first forward pass
    prefill_s: float  # from there to the token
    num_cached: int = 0  # tokens of the prompt that were in the prefix cache


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The prefill worker is done with a request: its blocks are free again."""

    request_id: str
    attempt: int
    epoch: str
    num_kv_bytes: int
    times: HandoffTimes | None  # None when every choice finished at its first token


@dataclass(frozen=True, slots=True)
class Tokens:
    """All tokens of one decode step."""

    epoch: str
    rows: tuple[TokenRow, ...]
    begun: tuple[Begun, ...] = ()  # handed-over requests of which this was the first step
    unsent_s: float = 0.0  # how long this message lay in its worker; put in when it is sent


@dataclass(frozen=True, slots=True)
class Observed:
    """Steps, windows and operations of a worker since its last one, as long as it is observed.

    A row has the columns of splitserve.profiling.step_log.STEP; for `ended_at` stands how long ago
    that was, seconds.
    """

    worker_id: str
    epoch: str
    rows: tuple[tuple[float, ...], ...]
    windows: tuple[ObservedWindow, ...]
    num_lost: int  # rows that were overwritten, operations that there was no room for
    kernels: tuple[KernelEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker gives a request up and holds nothing of it any more.

    `kept`: only its hand-off has failed; the prompt's KV stays, for a Retarget or until Release.
    """

    request_id: str
    attempt: int
    epoch: str
    stage: Stage
    reason: str
    retriable: bool
    kept: bool = False


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """From the launcher: a process it started is gone and reaped."""

    launch_id: str
    pid: int
    exit_code: int  # negative: the signal
    last_lines: str  # the end of what it printed, at most 4 kB


# -- to the launcher (control channel) ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Start one worker."""

    launch_id: str
    role: Role


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop a worker: SIGTERM, and SIGKILL after the grace."""

    launch_id: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class Targets:
    """How many workers are wanted now; a coordinator that is started again is told so."""

    prefill: int
    decode: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Every worker asked for at the start is ready; HTTP answers at base_url."""

    epoch: str
    base_url: str
    promises: Promises  # for a coordinator that is started again


# -- prefill → decode (data channel) -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """Announces a prompt whose KV will come; all the decode worker must know to go on with it."""

    request_id: str
    attempt: int
    epoch: str
    to_worker_id: str
    from_worker_id: str
    reply_to: str  # the coordinator that gets the tokens; its epoch, as long as there is one
    layout: KVLayout
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    choices: tuple[Choice, ...]
    sampling: Sampling
    deadline_s: float
    stall_timeout_s: float


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """Announces one raw buffer: C-contiguous [layers, 2, tokens, heads, head_dim] of a region."""

    request_id: str
    attempt: int
    epoch: str
    region: Region
    checksum: int  # xxh3_64 of the buffer


@dataclass(frozen=True, slots=True)
class Computing:
    """Nothing to send for now: more is being computed, or waits for room behind other transfers.

    Repeated while that lasts, so that a long step is not taken for a broken transfer.
    """

    request_id: str
    attempt: int
    epoch: str


@dataclass(frozen=True, slots=True)
class Computed:
    """All of the prompt is computed: from now on only the transfer keeps its KV away."""

    request_id: str
    attempt: int
    epoch: str


@dataclass(frozen=True, slots=True)
class Commit:
    """All KV has been sent. Carries the first token of each unfinished choice."""

    request_id: str
    attempt: int
    epoch: str
    first_tokens: tuple[TokenRow, ...]
    num_kv_bytes: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget this attempt; behind everything else sent for it. Answered by AbortAck."""

    request_id: str
    attempt: int
    epoch: str


# -- decode → prefill (data channel) -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grant:
    """Blocks are reserved; send KV from `first_missing_token` on."""

    request_id: str
    attempt: int
    epoch: str
    first_missing_token: int


@dataclass(frozen=True, slots=True)
class Queued:
    """No room yet; a Grant or a Refuse will follow. The prefill worker keeps its blocks."""

    request_id: str
    attempt: int
    epoch: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The decode worker won't take this attempt."""

    request_id: str
    attempt: int
    epoch: str
    reason: str
    retriable: bool


@dataclass(frozen=True, slots=True)
class Received:
    """Every byte of the attempt is here and verified."""

    request_id: str
    attempt: int
    epoch: str
    waited_s: float = 0.0  # how long the Commit lay here before the loop took it
    unsent_s: float = 0.0  # how long this message lay here; put in when it is sent


@dataclass(frozen=True, slots=True)
class Incomplete:
    """Commit came, these regions did not. They are sent once more, then a new Commit."""

    request_id: str
    attempt: int
    epoch: str
    missing: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class AbortAck:
    """Nothing of this attempt is held here any more. Answers Abort, or a message out of turn."""

    request_id: str
    attempt: int
    epoch: str


ToWorker = (
    Welcome
    | Reject
    | HeartbeatAck
    | Prefill
    | Retarget
    | Release
    | Drain
    | PeerGone
    | Observe
    | ResetPrefixCache
)
ToCoordinator = (
    Hello | Heartbeat | FirstToken | HandedOver | Tokens | Observed | Failed | ProcessExited
)
ToLauncher = Welcome | Reject | HeartbeatAck | Start | Stop | Targets | Ready
PrefillToDecode = Open | FrameHeader | Computing | Computed | Commit | Abort
DecodeToPrefill = Grant | Queued | Refuse | Received | Incomplete | AbortAck
Message = ToWorker | ToCoordinator | ToLauncher | PrefillToDecode | DecodeToPrefill
