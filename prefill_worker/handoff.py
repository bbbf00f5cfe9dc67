"""The prefill side of the hand-off. Pure: messages and progress in, actions out.

                    Grant                 all sent, first token known          Received
    opened ──────────────────► granted ───────────────────────────► committed ─────────► done
      │ ▲ Queued (no timer)       ▲                                     │
      ▼ │                         └───────────── Incomplete (once) ─────┘
    queued          Refuse, AbortAck, stall, deadline from any state: Abort, Failed

Frames go out as chunks are computed, as soon as there is a Grant; `pump` asks how much room the
transport has, so a slow peer holds back only its own transfers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kv_transfer.chunks import region_bytes, split_regions
from splitserve.config import KVLayout
from splitserve.scheduling.sequence import Request, RequestKey
from splitserve.wire import messages as m


@dataclass(frozen=True, slots=True)
class Send:
    """Put a message on the data channel."""

    peer: str
    message: m.Open | m.Commit | m.Abort


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Read a region of a prompt's KV and send it."""

    peer: str
    key: RequestKey
    epoch: str
    region: m.Region


@dataclass(frozen=True, slots=True)
class Finish:
    """Free the prompt's blocks and tell the coordinator."""

    key: RequestKey
    report: m.HandedOver | m.Failed


@dataclass(frozen=True, slots=True)
class Disconnect:
    """A peer has gone silent and no other hand-off goes there: drop what waits for it."""

    peer: str


Action = Send | SendFrame | Finish | Disconnect
State = Literal["opened", "queued", "granted", "committed"]


@dataclass(slots=True, eq=False)
class Handoff:
    """One prompt on its way to its decode worker."""

    request: Request
    peer: str
    heard_at: float  # the last sign of progress; the stall timer counts from here
    state: State = "opened"
    granted_at: float = 0.0
    num_computed: int = 0
    num_split: int = 0  # tokens already turned into pending regions
    pending: deque[m.Region] = field(default_factory=deque)
    first_tokens: tuple[m.TokenRow, ...] | None = None
    resent: bool = False
    num_kv_bytes: int = 0  # of the whole transfer; what is sent again does not count twice

    @property
    def all_sent(self) -> bool:
        return not self.pending and self.num_split == len(self.request.token_ids)

    def due(self) -> float:
        """When it has to give up."""
        if self.state == "queued" or (self.state == "granted" and self.waits_for_compute):
            return self.request.deadline
        return min(self.request.deadline, self.heard_at + self.request.stall_timeout_s)

    @property
    def waits_for_compute(self) -> bool:
        return not self.pending and self.first_tokens is None


class Handoffs:
    """Every hand-off of one prefill worker."""

    def __init__(self, worker_id: str, layout: KVLayout, max_frame_bytes: int) -> None:
        self._worker_id = worker_id
        self._layout = layout
        self._max_frame_bytes = max_frame_bytes
        self._handoffs: dict[RequestKey, Handoff] = {}

    @property
    def num_in_flight(self) -> int:
        """Transfers that a decode worker has granted and not acknowledged."""
        return sum(h.state in ("granted", "committed") for h in self._handoffs.values())

    def due(self) -> float | None:
        """When `expire` has something to do."""
        return min((h.due() for h in self._handoffs.values()), default=None)

    def open(self, request: Request, to: tuple[str, str], reply_to: str, now: float) -> Send:
        """Announce an admitted prompt to the decode worker `to` = (worker_id, endpoint)."""
        worker_id, peer = to
        self._handoffs[request.key] = Handoff(request, peer, heard_at=now)
        message = m.Open(
            *request.key,
            epoch=request.epoch,
            to_worker_id=worker_id,
            from_worker_id=self._worker_id,
            reply_to=reply_to,
            layout=self._layout,
            token_ids=request.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            choices=request.choices,
            sampling=request.sampling,
            deadline_s=request.deadline - now,
            stall_timeout_s=request.stall_timeout_s,
        )
        return Send(peer, message)

    def computed(self, key: RequestKey, num_tokens: int) -> None:
        """The prompt's first `num_tokens` tokens have KV."""
        if handoff := self._handoffs.get(key):
            handoff.num_computed = num_tokens

    def prompt_finished(
        self, request: Request, unfinished: Sequence[m.TokenRow], now: float
    ) -> list[Action]:
        """The first tokens are drawn. With no choice left to go on, the hand-off ends here."""
        handoff = self._handoffs.get(request.key)
        if handoff is not None and unfinished:
            handoff.first_tokens = tuple(unfinished)
            handoff.heard_at = now
            return []
        report = m.HandedOver(*request.key, request.epoch, num_kv_bytes=0, transfer_s=0.0)
        return [*self.release(request.key), Finish(request.key, report)]

    def handle(self, message: m.PrefillToDecode | m.DecodeToPrefill, now: float) -> list[Action]:
        """An answer of the decode worker. Unknown attempts were released: nothing to do."""
        key = RequestKey(message.request_id, message.attempt)
        handoff = self._handoffs.get(key)
        if handoff is None:
            return []
        handoff.heard_at = now
        match message:
            case m.Grant():
                self._granted(handoff, message, now)
            case m.Queued():
                handoff.state = "queued" if handoff.state == "opened" else handoff.state
            case m.Refuse():
                del self._handoffs[key]
                failure = self._failed(handoff, message.reason, message.retriable, "admission")
                return [Finish(key, failure)]
            case m.Received():
                del self._handoffs[key]
                transfer_s = now - handoff.granted_at
                report = m.HandedOver(*key, handoff.request.epoch, handoff.num_kv_bytes, transfer_s)
                return [Finish(key, report)]
            case m.Incomplete() if not handoff.resent and handoff.state == "committed":
                handoff.resent = True
                handoff.state = "granted"
                for region in message.missing:
                    handoff.pending.extend(self._split(region))
            case m.Incomplete():
                return self._give_up(handoff, "KV was incomplete twice")
            case m.AbortAck():
                return self._give_up(handoff, "the decode worker no longer holds the transfer")
        return []

    def pump(self, room_bytes: Callable[[str], int]) -> list[Action]:
        """Frames that fit in the transport's room, and Commits behind the last of them."""
        actions: list[Action] = []
        staged: dict[str, int] = {}
        for key, handoff in self._handoffs.items():
            if handoff.state != "granted":
                continue
            self._cut(handoff)
            room = room_bytes(handoff.peer) - staged.get(handoff.peer, 0)
            while handoff.pending and region_bytes(self._layout, handoff.pending[0]) <= room:
                region = handoff.pending.popleft()
                num_bytes = region_bytes(self._layout, region)
                room -= num_bytes
                staged[handoff.peer] = staged.get(handoff.peer, 0) + num_bytes
                actions.append(SendFrame(handoff.peer, key, handoff.request.epoch, region))
            if handoff.all_sent and handoff.first_tokens is not None:
                handoff.state = "committed"
                actions.append(self._commit(handoff, handoff.first_tokens))
        return actions

    def sent(self, key: RequestKey, now: float) -> None:
        """A frame or Commit went out: the stall timer restarts."""
        if handoff := self._handoffs.get(key):
            handoff.heard_at = now

    def release(self, key: RequestKey) -> list[Action]:
        """Forget a hand-off; the decode worker hears Abort, behind all that was sent."""
        handoff = self._handoffs.pop(key, None)
        if handoff is None:
            return []
        return [Send(handoff.peer, m.Abort(*key, epoch=handoff.request.epoch))]

    def send_failed(self, key: RequestKey, reason: str) -> list[Action]:
        """A message could not be sent."""
        handoff = self._handoffs.get(key)
        return [] if handoff is None else self._give_up(handoff, reason)

    def expire(self, now: float) -> list[Action]:
        """Give up what is past its deadline or has stalled."""
        actions: list[Action] = []
        for handoff in [h for h in self._handoffs.values() if h.due() <= now]:
            if handoff.request.deadline <= now:
                actions += self._give_up(handoff, "the request's deadline passed", "deadline")
            else:
                seconds = handoff.request.stall_timeout_s
                actions += self._give_up(handoff, f"no progress for {seconds:g} s")
                if all(other.peer != handoff.peer for other in self._handoffs.values()):
                    actions.append(Disconnect(handoff.peer))
        return actions

    def _granted(self, handoff: Handoff, grant: m.Grant, now: float) -> None:
        if handoff.state in ("opened", "queued"):
            handoff.state = "granted"
            handoff.granted_at = now
            handoff.num_split = grant.first_missing_token
            num_missing = len(handoff.request.token_ids) - grant.first_missing_token
            handoff.num_kv_bytes = num_missing * self._layout.token_bytes

    def _cut(self, handoff: Handoff) -> None:
        """Turn what was computed since the last cut into regions to send."""
        if handoff.num_computed > handoff.num_split:
            layout = self._layout
            region = m.Region(
                0,
                layout.num_layers,
                handoff.num_split,
                handoff.num_computed,
                0,
                layout.num_kv_heads,
            )
            handoff.pending.extend(self._split(region))
            handoff.num_split = handoff.num_computed

    def _split(self, region: m.Region) -> list[m.Region]:
        return list(split_regions(self._layout, region, self._max_frame_bytes))

    def _commit(self, handoff: Handoff, first_tokens: tuple[m.TokenRow, ...]) -> Send:
        message = m.Commit(
            *handoff.request.key,
            epoch=handoff.request.epoch,
            first_tokens=first_tokens,
            num_kv_bytes=handoff.num_kv_bytes,
        )
        return Send(handoff.peer, message)

    def _give_up(self, handoff: Handoff, reason: str, stage: m.Stage = "transfer") -> list[Action]:
        key = handoff.request.key
        report = self._failed(handoff, reason, retriable=stage != "deadline", stage=stage)
        return [*self.release(key), Finish(key, report)]

    def _failed(
        self, handoff: Handoff, reason: str, retriable: bool, stage: m.Stage = "transfer"
    ) -> m.Failed:
        request = handoff.request
        return m.Failed(*request.key, request.epoch, stage, reason, retriable)
