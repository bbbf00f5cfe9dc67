"""One prompt's way to a decode worker, and the actions it asks for. Pure.

             blocks             Grant          all sent, first token known         Received
    waiting ───────► opened ─────────► granted ───────────────────────────► committed ─────► gone
                      │ ▲ Queued          ▲                                      │
                      ▼ │ (asks again)    └────────────── Incomplete (once) ─────┘
                     queued

              Refuse, AbortAck, stall, a dead peer                  Retarget
    any open state ───────────────────────────────────► unplaced ───────────► opened

An unplaced prompt keeps its blocks and goes on computing: only where it should go is unknown.
Release, the deadline, or a refusal that no other worker would take back end it in any state.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from kv_transfer.layout import region_bytes, region_fault
from prefill_worker.handoff_clock import HandoffClock
from splitserve.config import KVLayout
from splitserve.scheduling.sequence import Request, RequestKey
from splitserve.wire import messages as m

COMPUTING_EVERY_S = 5.0  # how often a peer hears that more KV comes, when none does


class Target(NamedTuple):
    """A decode worker, and the endpoint of its data channel."""

    worker_id: str
    endpoint: str


@dataclass(frozen=True, slots=True)
class Send:
    """Put a message on the data channel."""

    peer: str
    message: m.Open | m.Computing | m.Computed | m.Commit | m.Abort


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Read a region of a prompt's KV and send it."""

    peer: str
    key: RequestKey
    epoch: str
    region: m.Region


@dataclass(frozen=True, slots=True)
class Finish:
    """Free the prompt's blocks, then tell the coordinator, unless it knows."""

    key: RequestKey
    report: m.HandedOver | m.Failed | None


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the coordinator; the prompt stays."""

    message: m.Failed


@dataclass(frozen=True, slots=True)
class Rekey:
    """The prompt is another attempt from now on."""

    old: RequestKey
    request: Request


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Nothing goes to this peer any more: drop what waits for it."""

    peer: str


Action = Send | SendFrame | Finish | Report | Rekey | Disconnect
State = Literal["waiting", "unplaced", "opened", "queued", "granted", "committed"]


@dataclass(slots=True, eq=False)
class Handoff:
    """One prompt on its way to its decode worker."""

    request: Request
    target: Target | None
    heard_at: float  # the last sign of progress; the stall timer counts from here
    state: State = "waiting"
    announced: m.Open | None = None
    clock: HandoffClock = field(default_factory=HandoffClock)
    sent_at: float = -float("inf")  # when a frame last went out
    told_at: float = -float("inf")  # when the peer last heard Computing, with no frame since
    num_computed: int = 0
    num_split: int = 0  # tokens already turned into pending regions
    pending: deque[m.Region] = field(default_factory=deque)
    first_tokens: tuple[m.TokenRow, ...] | None = None
    resent: bool = False
    num_kv_bytes: int = 0  # of the whole transfer; what is sent again does not count twice

    @property
    def is_open(self) -> bool:
        """Whether the decode worker knows of it."""
        return self.state not in ("waiting", "unplaced")

    @property
    def peer(self) -> str:
        assert self.target is not None, f"{self.request.key} has no decode worker"
        return self.target.endpoint

    @property
    def all_sent(self) -> bool:
        return not self.pending and self.num_split == len(self.request.token_ids)

    @property
    def waits_for_compute(self) -> bool:
        return self.state == "granted" and not self.pending and self.first_tokens is None

    @property
    def ends_with_first_token(self) -> bool:
        """By length alone: then nothing is opened."""
        num_output = len(self.request.token_ids) - self.request.num_prompt_tokens
        return num_output + 1 >= self.request.sampling.max_tokens

    def due(self) -> float:
        """When it has to give up, or to ask again."""
        if not self.is_open or self.waits_for_compute:
            return self.request.deadline
        return min(self.request.deadline, self.heard_at + self.request.stall_timeout_s)

    def open(self, reply_to: str, worker_id: str, layout: KVLayout, now: float) -> Send:
        """Announce it to its decode worker; all of its KV is to be sent there."""
        assert self.target is not None
        request = self.request
        self.state, self.heard_at, self.resent = "opened", now, False
        self.num_split, self.sent_at, self.told_at = 0, -float("inf"), -float("inf")
        self.pending.clear()
        self.announced = m.Open(
            *request.key,
            epoch=request.epoch,
            to_worker_id=self.target.worker_id,
            from_worker_id=worker_id,
            reply_to=reply_to,
            layout=layout,
            token_ids=request.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            choices=request.choices,
            sampling=request.sampling,
            deadline_s=request.deadline - now,
            stall_timeout_s=request.stall_timeout_s,
        )
        return Send(self.peer, self.announced)

    def ask_again(self, now: float) -> Send:
        """Queued: its Grant may have been lost. A second Open is answered as it stands."""
        assert self.announced is not None
        self.heard_at = now
        return Send(self.peer, replace(self.announced, deadline_s=self.request.deadline - now))

    def granted(self, first_missing_token: int, layout: KVLayout, at: float, now: float) -> None:
        """The Grant came `at`, and is taken now."""
        if self.state in ("opened", "queued"):
            self.state = "granted"
            self.sent_at = now
            self.clock.granted(at)
            self.num_split = first_missing_token
            num_missing = len(self.request.token_ids) - first_missing_token
            self.num_kv_bytes = num_missing * layout.token_bytes

    def cut(self, layout: KVLayout) -> m.Region | None:
        """What was computed since the last cut, to be sent."""
        if self.num_computed <= self.num_split:
            return None
        start, self.num_split = self.num_split, self.num_computed
        return m.Region(0, layout.num_layers, start, self.num_computed, 0, layout.num_kv_heads)

    def is_beyond(self, message: m.PrefillToDecode | m.DecodeToPrefill, layout: KVLayout) -> bool:
        """Whether an answer asks for more than this prompt has."""
        num_tokens = len(self.request.token_ids)
        match message:
            case m.Grant(first_missing_token=first):
                return first > num_tokens
            case m.Incomplete(missing=missing):
                num_bytes = sum(region_bytes(layout, region) for region in missing)
                outside = any(region_fault(layout, region, num_tokens) for region in missing)
                return outside or not 0 < num_bytes <= num_tokens * layout.token_bytes
        return False

    def prompt_finished(self, unfinished: tuple[m.TokenRow, ...], now: float) -> list[Action]:
        """The first tokens are drawn, and choices go on."""
        assert self.state != "waiting", "a prompt goes on that was not opened"
        self.first_tokens = unfinished
        self.heard_at = self.clock.first_token_at = now
        return self.computed()

    def sent(self, now: float) -> None:
        """A frame went out: the stall timer restarts."""
        self.heard_at = self.sent_at = now
        self.told_at = -float("inf")
        self.clock.sent(now)

    def computing(self, now: float) -> list[Action]:
        """The peer hears that more will come, unless it did a moment ago."""
        if now - self.told_at < COMPUTING_EVERY_S:
            return []
        self.told_at = now
        return [Send(self.peer, m.Computing(*self.request.key, epoch=self.request.epoch))]

    def computed(self) -> list[Action]:
        """Tell the decode worker, ahead of the last frames, that only they are missing now."""
        if self.state != "granted" or self.first_tokens is None:
            return []
        return [Send(self.peer, m.Computed(*self.request.key, epoch=self.request.epoch))]

    def commit(self) -> Send:
        assert self.first_tokens is not None
        self.state = "committed"
        key, epoch = self.request.key, self.request.epoch
        return Send(self.peer, m.Commit(*key, epoch, self.first_tokens, self.num_kv_bytes))

    def abort(self) -> list[Action]:
        """Tell the decode worker to forget it, behind all that was sent; if it knows of it."""
        if not self.is_open:
            return []
        return [Send(self.peer, m.Abort(*self.request.key, epoch=self.request.epoch))]

    def unplace(self) -> None:
        """No decode worker has it or will have it, for now."""
        self.state, self.target = "unplaced", None
        self.pending.clear()

    def rekey(self, attempt: int) -> None:
        """Another attempt: first tokens drawn before stay what they are."""
        self.request = self.request.at_attempt(attempt)
        if self.first_tokens is not None:
            self.first_tokens = tuple(replace(row, attempt=attempt) for row in self.first_tokens)

    def handed_over(self, received_at: float, waited_s: float) -> m.HandedOver:
        """All is at the decode worker, which said so `received_at`."""
        times = self.clock.times(received_at, waited_s)
        return m.HandedOver(*self.request.key, self.request.epoch, self.num_kv_bytes, times)

    def over_at_once(self) -> m.HandedOver:
        """No choice goes on."""
        return m.HandedOver(*self.request.key, self.request.epoch, num_kv_bytes=0, times=None)

    def failed(
        self, stage: m.Stage, reason: str, retriable: bool = True, kept: bool = False
    ) -> m.Failed:
        request = self.request
        return m.Failed(*request.key, request.epoch, stage, reason, retriable, kept)


def answer_to_stray(
    here: Handoff | None, peer: str, message: m.PrefillToDecode | m.DecodeToPrefill
) -> list[Action]:
    """Tell a decode worker that waits for more of an attempt that is over: an Abort was lost.

    `here` is what is left of the request. Not for an attempt that is still to be opened.
    """
    if not isinstance(message, m.Grant | m.Queued | m.Incomplete):
        return []  # it holds nothing, or goes on by itself
    if here is not None:
        current = here.request.key.attempt
        if message.attempt > current or (message.attempt == current and here.state != "unplaced"):
            return []
    return [Send(peer, m.Abort(message.request_id, message.attempt, message.epoch))]
