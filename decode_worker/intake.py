"""How prompts come in: one line for all who wait for room, then the receipt of their KV. Pure.

    Open ──► waiting ──► granted ── Commit, all there ──► begun
               │            │  ▲
               │            │  └── Incomplete (once): what is still missing is sent again
               ▼            ▼
           Abort, Release, deadline, a dead peer (stall only while granted): dropped

There is one attempt at a request at a time: whoever adds one has ended the ones before it.

A transfer stalls when KV is due and doesn't come. None is due while the peer computes: after the
Grant, an Incomplete and each Computing it may be in a step that lasts as long as a step may.

A prompt that this worker computes itself waits in the same line and begins when it has room.
The line is served in order, but a few younger prompts may pass one that does not fit; then freed
blocks are kept for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from decode_worker.incoming import (
    AcceptFrames,
    Action,
    BeginLocal,
    Drop,
    EndQuarantine,
    Incoming,
    Quarantine,
    Reply,
    Report,
    Sender,
    commit_fits,
)
from kv_transfer.base import FrameDropped, FrameWritten
from kv_transfer.chunks import Coverage
from splitserve.config import KVLayout
from splitserve.scheduling.block_manager import BlockManager
from splitserve.scheduling.prefix_cache import PrefixCache
from splitserve.scheduling.sequence import Request, RequestKey, blocks_to_begin
from splitserve.wire import messages as m

MAX_PASSES = 4  # younger prompts that may pass one that waits
MAX_GONE = 1000  # dead peers that are remembered


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """What a worker can take on."""

    max_num_seqs: int
    vocab_size: int
    max_model_len: int
    max_step_s: float = 60.0  # of any worker; one that takes longer is wedged


@dataclass(slots=True)
class Intake:
    """Every prompt that is not decoded yet."""

    layout: KVLayout
    blocks: BlockManager
    limits: IntakeLimits
    cache: PrefixCache
    _waiting: dict[str, Incoming] = field(default_factory=dict)  # by request_id
    _granted: dict[str, Incoming] = field(default_factory=dict)
    _gone: dict[str, None] = field(default_factory=dict)  # worker ids, oldest first
    _num_arrived: int = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_granted(self) -> int:
        return len(self._granted)

    @property
    def num_granted_choices(self) -> int:
        return sum(len(incoming.request.choices) for incoming in self._granted.values())

    @property
    def num_late(self) -> int:
        """Of these, the ones that are computed: only their KV is missing."""
        return sum(incoming.is_computed for incoming in self._granted.values())

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._granted)

    @property
    def keys(self) -> list[RequestKey]:
        return [i.request.key for i in (*self._waiting.values(), *self._granted.values())]

    def incoming(self, request_id: str) -> Incoming | None:
        """The attempt at a request that is on its way in."""
        return self._waiting.get(request_id) or self._granted.get(request_id)

    def is_gone(self, worker_id: str) -> bool:
        """Whether this prefill worker is dead to the cluster, whatever may still come from it."""
        return worker_id in self._gone

    def due(self) -> float | None:
        """When `expire` has something to do."""
        everyone = (*self._waiting.values(), *self._granted.values())
        return min((incoming.due() for incoming in everyone), default=None)

    def add(self, request: Request, sender: Sender | None) -> None:
        """A prompt joins the line; `admit` answers it."""
        request_id = request.key.request_id
        assert self.incoming(request_id) is None, f"two attempts at {request_id}"
        self._num_arrived += 1
        self._waiting[request_id] = Incoming(request, sender, self._num_arrived, Coverage())

    def never_fits(self, request: Request) -> bool:
        """Whether the prompt and its choices need more than an empty worker has."""
        too_many = len(request.choices) > self.limits.max_num_seqs
        return too_many or self._blocks_for(request) > self.blocks.counts.total

    def admit(self, spare_blocks: int, num_choices: int, now: float) -> list[Action]:
        """Serve the line: `spare_blocks` may be given away, `num_choices` are being decoded."""
        actions: list[Action] = []
        num_choices += self.num_granted_choices
        blocked: Incoming | None = None
        for incoming in list(self._waiting.values()):
            request = incoming.request
            needed, num_more = self._blocks_for(request), num_choices + len(request.choices)
            if needed > spare_blocks or num_more > self.limits.max_num_seqs:
                blocked = blocked or incoming
                continue
            if self.cache.blocked_by(request.token_ids, incoming.most_known) is not None:
                continue  # its next block is just being computed or received, for another
            if blocked is not None:
                if blocked.passed >= MAX_PASSES:
                    break
                blocked.passed += 1
            spare_blocks -= needed
            num_choices = num_more
            actions += self._admit_one(incoming, needed, now)
        return actions + self._answer_those_who_wait()

    def written(self, event: FrameWritten, now: float) -> list[Action]:
        """A frame's bytes are in place."""
        incoming = self._granted_one(RequestKey(*event.key))
        if incoming is None:
            return []
        incoming.coverage.add(event.region)
        incoming.expect_kv(now)
        return self._begin_if_whole(incoming, now, now)

    def dropped(self, event: FrameDropped) -> None:
        """A frame could not be taken."""
        incoming = self._granted_one(RequestKey(*event.key))
        if incoming is not None:
            incoming.spoilt = True

    def computing(self, message: m.Computing, now: float) -> list[Action] | None:
        """The peer has sent what it has, and computes more; None when this holds no grant."""
        incoming = self._granted_one(RequestKey(message.request_id, message.attempt))
        if incoming is None:
            return None
        incoming.expect_compute(self.limits.max_step_s, now)
        return []

    def computed(self, message: m.Computed) -> list[Action] | None:
        """The prompt is computed: its KV is late from now on; None when this holds no grant."""
        incoming = self._granted_one(RequestKey(message.request_id, message.attempt))
        if incoming is None:
            return None
        incoming.is_computed = True
        return []

    def commit(self, message: m.Commit, now: float, at: float | None = None) -> list[Action] | None:
        """Begin when every byte is here, or else once it is; None: this attempt has no grant.

        It came `at`: now, unless the loop was busy.
        """
        key = RequestKey(message.request_id, message.attempt)
        incoming = self._granted_one(key)
        if incoming is None or incoming.sender is None:
            return None
        if not commit_fits(incoming.request, message, self.limits.vocab_size):
            return self._fail(incoming, "transfer", "Commit does not fit its Open", retriable=False)
        incoming.commit = message
        incoming.expect_kv(now)
        return self._begin_if_whole(incoming, now if at is None else at, now) or (
            self._ask(incoming, now) if incoming.spoilt else []
        )

    def release(self, key: RequestKey) -> list[Action]:
        """Forget a prompt, at this attempt or one before it, granted or waiting."""
        for line in (self._granted, self._waiting):
            incoming = line.get(key.request_id)
            if incoming is not None and incoming.request.key.attempt <= key.attempt:
                del line[key.request_id]
                return self._drop(incoming)
        return []

    def unreachable(self, key: RequestKey) -> list[Action]:
        """The prefill worker could not be told where its prompt stands."""
        incoming = self._granted_one(key) or self._waiting.get(key.request_id)
        if incoming is None or incoming.request.key != key:
            return []
        return self._fail(incoming, "transfer", "the prefill worker is unreachable", retriable=True)

    def peer_gone(self, worker_id: str, reaped: bool, one_sided: bool) -> list[Action]:
        """Forget all prompts of a dead prefill worker; the coordinator knows.

        Until it is `reaped` it may still write to what it was granted, if writes are `one_sided`.
        """
        actions: list[Action] = [EndQuarantine(worker_id)] if reaped else []
        for line in (self._waiting, self._granted):
            for incoming in list(line.values()):
                if incoming.sender is None or incoming.sender.worker_id != worker_id:
                    continue
                key = incoming.request.key
                del line[key.request_id]
                late = one_sided and not reaped
                actions += self._drop(incoming, writer=worker_id if late else None)
        self._gone[worker_id] = None
        while len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]
        return actions

    def expire(self, now: float) -> list[Action]:
        """Give up prompts past their deadline, and transfers that have stalled."""
        actions: list[Action] = []
        for incoming in [*self._waiting.values(), *self._granted.values()]:
            request = incoming.request
            if request.deadline <= now:
                reason = "the request's deadline passed"
                actions += self._fail(incoming, "deadline", reason, retriable=False)
            elif incoming.stalls_at <= now:
                actions += self._fail(incoming, "transfer", "no KV came in time", retriable=True)
            elif incoming.asks_at <= now:
                actions += self._ask(incoming, now)
        return actions

    def _granted_one(self, key: RequestKey) -> Incoming | None:
        incoming = self._granted.get(key.request_id)
        return incoming if incoming and incoming.request.key == key else None

    def _begin_if_whole(self, incoming: Incoming, whole_at: float, now: float) -> list[Action]:
        if incoming.commit is None or incoming.missing(self.layout):
            return []
        del self._granted[incoming.request.key.request_id]
        return incoming.begin(whole_at, now)

    def _ask(self, incoming: Incoming, now: float) -> list[Action]:
        """What has not come by now is lost."""
        assert incoming.sender is not None
        if incoming.resent:
            return self._fail(incoming, "transfer", "KV was incomplete twice", retriable=True)
        again = incoming.ask_again(incoming.missing(self.layout), self.limits.max_step_s, now)
        return [Reply(incoming.sender.peer, again)]

    def _admit_one(self, incoming: Incoming, needed: int, now: float) -> list[Action]:
        """`needed` blocks, those that are cached among them."""
        key, request = incoming.request.key, incoming.request
        del self._waiting[key.request_id]
        known = self.cache.match(request.token_ids, incoming.most_known)
        self.cache.claim(key, request.token_ids)
        needed -= len(known.block_ids)
        local = incoming.sender is None
        missing = self.blocks.allocate(needed) if local else self.blocks.reserve(key, needed)
        assert missing is not None, "spare blocks are not free"
        block_ids = [*known.block_ids, *missing]
        if local:
            return [BeginLocal(request, block_ids, incoming.order, known)]
        incoming.known = known
        incoming.expect_compute(self.limits.max_step_s, now)
        self._granted[key.request_id] = incoming
        sizes = len(request.token_ids), known.num_tokens
        return [AcceptFrames(key, tuple(block_ids), *sizes), incoming.answer()]

    def _drop(self, incoming: Incoming, writer: str | None = None) -> list[Action]:
        """What is here of it is free, but for what a `writer` may still write to."""
        key, known = incoming.request.key, incoming.known
        if known is None:
            return []
        self.cache.release(key)
        return [Drop(key, known) if writer is None else Quarantine(key, known, writer)]

    def _answer_those_who_wait(self) -> list[Action]:
        waiting = self._waiting.values()
        return [one.answer() for one in waiting if one.sender is not None and not one.told]

    def _fail(
        self, incoming: Incoming, stage: m.Stage, reason: str, retriable: bool
    ) -> list[Action]:
        request = incoming.request
        actions = self.release(request.key)
        if incoming.sender is not None:
            ack = m.AbortAck(*request.key, epoch=request.epoch)
            actions.append(Reply(incoming.sender.peer, ack))
        failed = m.Failed(*request.key, request.epoch, stage, reason, retriable)
        return [*actions, Report(failed)]

    def _blocks_for(self, request: Request) -> int:
        return blocks_to_begin(len(request.token_ids), len(request.choices), self.layout.block_size)
