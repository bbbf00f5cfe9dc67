"""A prompt on its way in, and the actions the intake asks for. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kv_transfer.chunks import Coverage
from splitserve.config import KVLayout
from splitserve.scheduling.prefix_cache import Match
from splitserve.scheduling.sequence import Request, RequestKey
from splitserve.wire import messages as m


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the prefill worker."""

    peer: str
    message: m.DecodeToPrefill


@dataclass(frozen=True, slots=True)
class AcceptFrames:
    """Let frames of this transfer write into its reserved blocks. Comes before the Grant."""

    key: RequestKey
    block_ids: tuple[int, ...]
    num_tokens: int
    first_missing_token: int  # what is before it is read by others, and never written


@dataclass(frozen=True, slots=True)
class Begin:
    """All KV is here: commit the reserved blocks and decode."""

    request: Request
    first_tokens: tuple[m.TokenRow, ...]
    order: int
    whole_at: float  # when the Commit came, or a frame behind it
    known: Match  # its blocks come first


@dataclass(frozen=True, slots=True)
class BeginLocal:
    """There is room for a prompt that this worker computes itself, behind what is cached."""

    request: Request
    block_ids: list[int]  # all of them
    order: int
    known: Match


@dataclass(frozen=True, slots=True)
class Drop:
    """Stop writes of this transfer, then cancel its reservation and free what it shares."""

    key: RequestKey
    known: Match


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Take the grant back, but keep its blocks out of use: a dead peer may still write to them.
    Not to those it shares, which are freed."""

    key: RequestKey
    known: Match
    writer: str


@dataclass(frozen=True, slots=True)
class EndQuarantine:
    """This peer's process has ended, and with it its writes."""

    writer: str


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the coordinator."""

    message: m.Failed


Action = Reply | AcceptFrames | Begin | BeginLocal | Drop | Quarantine | EndQuarantine | Report


# A transport may let a Commit pass the frames before it: for how long they are waited for.
LATE_FRAME_S = 1.0


class Sender(NamedTuple):
    """A prefill worker, and what its data connection is called here."""

    worker_id: str
    peer: str


@dataclass(slots=True, eq=False)
class Incoming:
    """One prompt on its way in. Without a peer it is to be computed here."""

    request: Request
    sender: Sender | None
    order: int
    coverage: Coverage
    stalls_at: float = float("inf")
    known: Match | None = None  # what is here of it, pinned: granted
    told: bool = False  # that it waits
    is_computed: bool = False  # all of it, so that only the transfer keeps it away
    commit: m.Commit | None = None  # the last one, while KV is missing
    asks_at: float = float("inf")  # when to ask for what is missing
    spoilt: bool = False  # a frame came and could not be taken: it won't come by itself
    resent: bool = False
    passed: int = 0

    @property
    def is_granted(self) -> bool:
        return self.known is not None

    @property
    def first_missing_token(self) -> int:
        return self.known.num_tokens if self.known is not None else 0

    @property
    def most_known(self) -> int:
        """Tokens that may be taken from a cache. Who computes a prompt computes its last one."""
        return len(self.request.token_ids) - (self.sender is None)

    def missing(self, layout: KVLayout) -> tuple[m.Region, ...]:
        """What has not come of its KV."""
        start, end = self.first_missing_token, len(self.request.token_ids)
        if start == end:
            return ()
        whole = m.Region(0, layout.num_layers, start, end, 0, layout.num_kv_heads)
        return self.coverage.missing(whole)

    def comes_from(self, peer: str) -> bool:
        return self.sender is not None and self.sender.peer == peer

    def answer(self) -> Reply:
        """What its Open is answered with, as it stands."""
        assert self.sender is not None
        key, epoch = self.request.key, self.request.epoch
        if self.is_granted:
            return Reply(self.sender.peer, m.Grant(*key, epoch, self.first_missing_token))
        self.told = True
        return Reply(self.sender.peer, m.Queued(*key, epoch))

    def due(self) -> float:
        return min(self.request.deadline, self.stalls_at, self.asks_at)

    def expect_kv(self, now: float) -> None:
        """More frames or the Commit come next. Behind the Commit, they must not be long."""
        stall_s = self.request.stall_timeout_s
        self.stalls_at = now + stall_s
        if self.commit is not None:
            self.asks_at = now + min(LATE_FRAME_S, stall_s / 2)

    def ask_again(
        self, missing: tuple[m.Region, ...], max_step_s: float, now: float
    ) -> m.Incomplete:
        """What is missing is to be sent once more, with another Commit behind it."""
        self.resent, self.spoilt = True, False
        self.commit, self.asks_at = None, float("inf")
        self.expect_compute(max_step_s, now)  # the peer hears it between two steps
        return m.Incomplete(*self.request.key, epoch=self.request.epoch, missing=missing)

    def begin(self, whole_at: float, now: float) -> list[Action]:
        """All of it is here. How long that went unseen is no part of the transfer."""
        assert self.sender is not None and self.commit is not None and self.known is not None
        key, epoch = self.request.key, self.request.epoch
        received = m.Received(*key, epoch, waited_s=max(0.0, now - whole_at))
        begin = Begin(self.request, self.commit.first_tokens, self.order, whole_at, self.known)
        return [begin, Reply(self.sender.peer, received)]

    def expect_compute(self, max_step_s: float, now: float) -> None:
        """The peer may be in a step; half as much again, for whatever delays its word."""
        self.stalls_at = now + max(self.request.stall_timeout_s, 1.5 * max_step_s)


def commit_fits(request: Request, commit: m.Commit, vocab_size: int) -> bool:
    """Whether Commit brings one possible token for some of the choices, each at most once."""
    wanted = {choice.choice_id for choice in request.choices}
    got = [row.choice_id for row in commit.first_tokens]
    if not got or len(set(got)) != len(got) or not set(got) <= wanted:
        return False
    index = len(request.token_ids) - request.num_prompt_tokens
    return commit.epoch == request.epoch and all(
        (row.request_id, row.attempt) == request.key
        and row.first_index == index
        and len(row.tokens) == 1
        and 0 <= row.tokens[0] < vocab_size
        and len(row.logprobs or (None,)) == 1
        for row in commit.first_tokens
    )
