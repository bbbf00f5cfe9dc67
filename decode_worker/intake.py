"""How prompts come in: one line for all who wait for room, then the receipt of their KV. Pure.

    Open ──► waiting ──► granted ── Commit, all there ──► begun
               │            │  ▲
               │            │  └── Incomplete (once): what is missing is sent again
               ▼            ▼
           Abort, Release, deadline (stall only while granted): dropped

A prompt that this worker computes itself waits in the same line and begins when it has room.
The line is served in order, but a few younger prompts may pass one that does not fit; then freed
blocks are kept for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.base import FrameWritten
from kv_transfer.chunks import Coverage
from splitserve.config import KVLayout
from splitserve.scheduling.block_manager import BlockManager
from splitserve.scheduling.sequence import Request, RequestKey, blocks_to_begin
from splitserve.wire import messages as m

MAX_PASSES = 4  # younger prompts that may pass one that waits


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


@dataclass(frozen=True, slots=True)
class Begin:
    """All KV is here: commit the reserved blocks and decode."""

    request: Request
    first_tokens: tuple[m.TokenRow, ...]
    order: int


@dataclass(frozen=True, slots=True)
class BeginLocal:
    """There is room for a prompt that this worker computes itself."""

    request: Request
    block_ids: list[int]
    order: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Stop writes of this transfer, then cancel its reservation."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the coordinator."""

    message: m.Failed


Action = Reply | AcceptFrames | Begin | BeginLocal | Drop | Report


@dataclass(slots=True, eq=False)
class Incoming:
    """One prompt on its way in. Without a peer it is to be computed here."""

    request: Request
    peer: str | None
    order: int
    coverage: Coverage
    written_at: float = 0.0  # the stall timer counts from the Grant and from each write
    told: bool = False  # that it waits
    resent: bool = False
    passed: int = 0

    def due(self, granted: bool) -> float:
        if not granted:
            return self.request.deadline
        return min(self.request.deadline, self.written_at + self.request.stall_timeout_s)


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """What a worker can take on."""

    max_num_seqs: int
    vocab_size: int


@dataclass(slots=True)
class Intake:
    """Every prompt that is not decoded yet."""

    layout: KVLayout
    blocks: BlockManager
    limits: IntakeLimits
    _waiting: dict[RequestKey, Incoming] = field(default_factory=dict)
    _granted: dict[RequestKey, Incoming] = field(default_factory=dict)
    _num_arrived: int = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_granted(self) -> int:
        return len(self._granted)

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._granted)

    def knows(self, key: RequestKey) -> bool:
        return key in self._waiting or key in self._granted

    def due(self) -> float | None:
        """When `expire` has something to do."""
        waiting = [i.due(granted=False) for i in self._waiting.values()]
        granted = [i.due(granted=True) for i in self._granted.values()]
        return min([*waiting, *granted], default=None)

    def add(self, request: Request, peer: str | None) -> None:
        """A prompt joins the line; `admit` answers it."""
        self._num_arrived += 1
        self._waiting[request.key] = Incoming(request, peer, self._num_arrived, Coverage())

    def never_fits(self, request: Request) -> bool:
        """Whether the prompt and its choices need more than an empty worker has."""
        too_many = len(request.choices) > self.limits.max_num_seqs
        return too_many or self._blocks_for(request) > self.blocks.counts.total

    def admit(self, spare_blocks: int, num_choices: int, now: float) -> list[Action]:
        """Serve the line: `spare_blocks` may be given away, `num_choices` are being decoded."""
        actions: list[Action] = []
        num_choices += sum(len(i.request.choices) for i in self._granted.values())
        blocked: Incoming | None = None
        for incoming in list(self._waiting.values()):
            needed = self._blocks_for(incoming.request)
            fits = needed <= spare_blocks
            fits = fits and num_choices + len(incoming.request.choices) <= self.limits.max_num_seqs
            if not fits:
                blocked = blocked or incoming
                continue
            if blocked is not None:
                if blocked.passed >= MAX_PASSES:
                    break
                blocked.passed += 1
            spare_blocks -= needed
            num_choices += len(incoming.request.choices)
            actions += self._admit_one(incoming, needed, now)
        return actions + self._answer_those_who_wait()

    def written(self, event: FrameWritten, now: float) -> None:
        """A frame's bytes are in place."""
        incoming = self._granted.get(RequestKey(*event.key))
        if incoming is not None:
            incoming.coverage.add(event.region)
            incoming.written_at = now

    def commit(self, message: m.Commit, now: float) -> list[Action] | None:
        """Begin when every byte is here; None when this attempt holds no grant."""
        key = RequestKey(message.request_id, message.attempt)
        incoming = self._granted.get(key)
        if incoming is None or incoming.peer is None:
            return None
        epoch = incoming.request.epoch
        if not self._fits(incoming.request, message):
            return self._fail(incoming, "transfer", "Commit does not fit its Open", retriable=False)
        missing = incoming.coverage.missing(self._whole(incoming.request))
        if not missing:
            del self._granted[key]
            received = Reply(incoming.peer, m.Received(*key, epoch=epoch))
            return [Begin(incoming.request, message.first_tokens, incoming.order), received]
        if incoming.resent:
            return self._fail(incoming, "transfer", "KV was incomplete twice", retriable=True)
        incoming.resent = True
        incoming.written_at = now
        return [Reply(incoming.peer, m.Incomplete(*key, epoch=epoch, missing=missing))]

    def release(self, key: RequestKey) -> list[Action]:
        """Forget a prompt, granted or waiting."""
        if self._granted.pop(key, None) is not None:
            return [Drop(key)]
        self._waiting.pop(key, None)
        return []

    def expire(self, now: float) -> list[Action]:
        """Give up prompts past their deadline, and transfers that have stalled."""
        actions: list[Action] = []
        for incoming in [*self._waiting.values(), *self._granted.values()]:
            request = incoming.request
            if request.deadline <= now:
                reason = "the request's deadline passed"
                actions += self._fail(incoming, "deadline", reason, retriable=False)
            elif request.key in self._granted and incoming.due(granted=True) <= now:
                reason = f"no KV for {request.stall_timeout_s:g} s"
                actions += self._fail(incoming, "transfer", reason, retriable=True)
        return actions

    def _admit_one(self, incoming: Incoming, needed: int, now: float) -> list[Action]:
        request = incoming.request
        del self._waiting[request.key]
        if incoming.peer is None:
            block_ids = self.blocks.allocate(needed)
            assert block_ids is not None, "spare blocks are not free"
            return [BeginLocal(request, block_ids, incoming.order)]
        reserved = self.blocks.reserve(request.key, needed)
        assert reserved is not None, "spare blocks are not free"
        incoming.written_at = now
        self._granted[request.key] = incoming
        return [
            AcceptFrames(request.key, tuple(reserved), len(request.token_ids)),
            Reply(incoming.peer, m.Grant(*request.key, request.epoch, first_missing_token=0)),
        ]

    def _answer_those_who_wait(self) -> list[Action]:
        actions: list[Action] = []
        for key, incoming in self._waiting.items():
            if incoming.peer is not None and not incoming.told:
                incoming.told = True
                actions.append(Reply(incoming.peer, m.Queued(*key, incoming.request.epoch)))
        return actions

    def _fail(
        self, incoming: Incoming, stage: m.Stage, reason: str, retriable: bool
    ) -> list[Action]:
        request = incoming.request
        actions = self.release(request.key)
        if incoming.peer is not None:
            actions.append(Reply(incoming.peer, m.AbortAck(*request.key, epoch=request.epoch)))
        failed = m.Failed(*request.key, request.epoch, stage, reason, retriable)
        return [*actions, Report(failed)]

    def _blocks_for(self, request: Request) -> int:
        return blocks_to_begin(len(request.token_ids), len(request.choices), self.layout.block_size)

    def _whole(self, request: Request) -> m.Region:
        layout = self.layout
        num_tokens = len(request.token_ids)
        return m.Region(0, layout.num_layers, 0, num_tokens, 0, layout.num_kv_heads)

    def _fits(self, request: Request, commit: m.Commit) -> bool:
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
            and 0 <= row.tokens[0] < self.limits.vocab_size
            and len(row.logprobs or (None,)) == 1
            for row in commit.first_tokens
        )
