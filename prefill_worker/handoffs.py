"""Every hand-off of a prefill worker: messages and progress in, actions out. Pure.

Frames go out as chunks are computed, as soon as there is a Grant; `pump` asks how much room the
transport has, so a slow peer holds back only its own transfers. There is one attempt at a request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kv_transfer.chunks import region_bytes, split_regions
from prefill_worker.handoff import (
    COMPUTING_EVERY_S,
    Action,
    Disconnect,
    Finish,
    Handoff,
    Rekey,
    Report,
    Send,
    SendFrame,
    Target,
    answer_to_stray,
)
from splitserve.config import KVLayout
from splitserve.scheduling.sequence import Request, RequestKey
from splitserve.wire import messages as m

FromPeer = m.PrefillToDecode | m.DecodeToPrefill


class Handoffs:
    """Owns the hand-off of each prompt, from Prefill until its blocks are freed."""

    def __init__(self, worker_id: str, layout: KVLayout, max_frame_bytes: int) -> None:
        self._worker_id = worker_id
        self._layout = layout
        self._max_frame_bytes = max_frame_bytes
        self._handoffs: dict[str, Handoff] = {}  # by request_id
        self._endpoints: dict[str, str] = {}  # of every decode worker that is not known to be gone

    def __len__(self) -> int:
        return len(self._handoffs)

    @property
    def num_in_flight(self) -> int:
        """Transfers that a decode worker has granted and not acknowledged."""
        return sum(h.state in ("granted", "committed") for h in self._handoffs.values())

    @property
    def num_shipping(self) -> int:
        """Of these, the ones whose prompt is computed: only the transfer keeps them here."""
        in_flight = [h for h in self._handoffs.values() if h.state in ("granted", "committed")]
        return sum(h.first_tokens is not None for h in in_flight)

    @property
    def keys(self) -> list[RequestKey]:
        return [handoff.request.key for handoff in self._handoffs.values()]

    def due(self) -> float | None:
        """When `expire` has something to do."""
        return min((h.due() for h in self._handoffs.values()), default=None)

    def attempt_of(self, request_id: str) -> int | None:
        """Which attempt at a request is here."""
        handoff = self._handoffs.get(request_id)
        return None if handoff is None else handoff.request.key.attempt

    def add(self, request: Request, target: Target, now: float) -> None:
        """A prompt waits for its blocks; it is meant for `target`."""
        request_id = request.key.request_id
        assert request_id not in self._handoffs, f"two attempts at {request_id}"
        self._handoffs[request_id] = Handoff(request, target, heard_at=now)

    def open(self, key: RequestKey, reply_to: str, now: float, cached: int = 0) -> list[Action]:
        """A prompt holds its blocks, KV of `cached` tokens in them: announce it, unless it ends
        with its first token."""
        handoff = self._handoffs[key.request_id]
        handoff.num_computed = cached
        if handoff.ends_with_first_token:
            return []
        if handoff.target is None:
            handoff.unplace()
            return []
        return [self._open(handoff, reply_to, now)]

    def retarget(self, message: m.Retarget, reply_to: str, now: float) -> list[Action]:
        """Hand what is here of a prompt to another decode worker, as a new attempt."""
        handoff = self._handoffs.get(message.request_id)
        if handoff is None:
            key, reason = (message.request_id, message.attempt), "nothing of the prompt is here"
            return [Report(m.Failed(*key, message.epoch, "transfer", reason, retriable=True))]
        old = handoff.request.key
        if old.attempt >= message.attempt:
            return []
        actions = handoff.abort()
        handoff.rekey(message.attempt)
        handoff.target = Target(message.decode_worker_id, message.decode_endpoint)
        actions.append(Rekey(old, handoff.request))
        if handoff.state != "waiting":
            actions.append(self._open(handoff, reply_to, now))
        return actions

    def computed(self, key: RequestKey, num_tokens: int) -> None:
        """The prompt's first `num_tokens` tokens have KV."""
        self._handoffs[key.request_id].num_computed = num_tokens

    def prompt_finished(
        self, key: RequestKey, unfinished: Sequence[m.TokenRow], now: float
    ) -> list[Action]:
        """The first tokens are drawn. With no choice left to go on, the hand-off ends here."""
        handoff = self._handoffs[key.request_id]
        if unfinished:
            return handoff.prompt_finished(tuple(unfinished), now)
        return self._end(handoff, handoff.over_at_once())

    def first_token_sent(self, message: m.FirstToken, at: float) -> None:
        """It left `at`: from then on its reader waits for the hand-off."""
        if handoff := self._handoffs.get(message.request_id):
            handoff.clock.first_token_at = at

    def handle(
        self, peer: str, message: FromPeer, now: float, at: float | None = None
    ) -> list[Action]:
        """An answer of a decode worker, which came `at`: now, unless the loop was busy."""
        handoff = self._open_one(RequestKey(message.request_id, message.attempt))
        if handoff is None:
            if peer not in self._endpoints.values():
                return []  # it is dead: no new connection to it
            return answer_to_stray(self._handoffs.get(message.request_id), peer, message)
        handoff.heard_at, at = now, now if at is None else at
        if handoff.is_beyond(message, self._layout):
            reason = f"the {type(message).__name__} of the decode worker makes no sense"
            return self._misplaced(handoff, reason)
        match message:
            case m.Grant():
                handoff.granted(message.first_missing_token, self._layout, at, now)
                return handoff.computed()
            case m.Queued():
                handoff.state = "queued" if handoff.state == "opened" else handoff.state
            case m.Refuse():
                return self._refused(handoff, message)
            case m.Received() if handoff.state == "committed":
                del self._handoffs[message.request_id]
                report = handoff.handed_over(at, message.waited_s + message.unsent_s)
                return [Finish(handoff.request.key, report)]
            case m.Incomplete() if handoff.state == "committed":
                return self._send_again(handoff, message.missing)
            case m.AbortAck():
                reason = "the decode worker no longer holds the transfer"
                return self._misplaced(handoff, reason, aborts=False)
        return []

    def pump(self, room_bytes: Callable[[str], int]) -> list[Action]:
        """Frames that fit in the transport's room, and Commits behind the last of them."""
        actions: list[Action] = []
        staged: dict[str, int] = {}
        for handoff in self._handoffs.values():
            if handoff.state != "granted":
                continue
            if region := handoff.cut(self._layout):
                handoff.pending.extend(self._split(region))
            peer, key, epoch = handoff.peer, handoff.request.key, handoff.request.epoch
            room = room_bytes(peer) - staged.get(peer, 0)
            while handoff.pending and region_bytes(self._layout, handoff.pending[0]) <= room:
                region = handoff.pending.popleft()
                num_bytes = region_bytes(self._layout, region)
                room -= num_bytes
                staged[peer] = staged.get(peer, 0) + num_bytes
                actions.append(SendFrame(peer, key, epoch, region))
            if handoff.all_sent and handoff.first_tokens is not None:
                actions.append(handoff.commit())
        return actions

    def sent(self, key: RequestKey, now: float) -> None:
        """A frame went out: the stall timer restarts."""
        if handoff := self._open_one(key):
            handoff.sent(now)
            self.moved(handoff.peer, now)

    def moved(self, peer: str, now: float) -> None:
        """Bytes go out to a peer: what waits for room behind them has not stalled."""
        for handoff in self._handoffs.values():
            if handoff.state == "granted" and handoff.pending and handoff.peer == peer:
                handoff.heard_at = now

    def before_step(self, now: float) -> list[Action]:
        """Peers who would hear nothing for as long as the next step takes hear that it goes on."""
        going_on = [h for h in self._granted() if not h.all_sent or not h.first_tokens]
        return [action for handoff in going_on for action in handoff.computing(now)]

    def before_wait(self, now: float) -> list[Action]:
        """Peers whose KV has waited for room for a while hear that it goes on."""
        late = now - COMPUTING_EVERY_S
        waiting = [h for h in self._granted() if h.pending and h.sent_at <= late]
        return [action for handoff in waiting for action in handoff.computing(now)]

    def release(self, key: RequestKey) -> list[Action]:
        """Forget a prompt, at this attempt or an older one, wherever it is."""
        handoff = self._handoffs.get(key.request_id)
        if handoff is None or handoff.request.key.attempt > key.attempt:
            return []
        return self._end(handoff, None)

    def fail(
        self, key: RequestKey, stage: m.Stage, reason: str, retriable: bool = True
    ) -> list[Action]:
        """The prompt can't be computed: give all of it up."""
        handoff = self._handoffs[key.request_id]
        return self._end(handoff, handoff.failed(stage, reason, retriable))

    def keep_only(self, keep: Collection[RequestKey]) -> list[Action]:
        """Forget everything else, without a word to the coordinator: it is a new one."""
        gone = [h for h in self._handoffs.values() if h.request.key not in keep]
        actions = [action for handoff in gone for action in self._end(handoff, None)]
        return [*actions, *self._disconnect_unused()]

    def peer_gone(self, worker_id: str) -> list[Action]:
        """A decode worker is dead; the coordinator knows, and says where to go instead."""
        for handoff in self._handoffs.values():
            if handoff.target is None or handoff.target.worker_id != worker_id:
                continue
            if handoff.is_open:
                handoff.unplace()
            handoff.target = None
        endpoint = self._endpoints.pop(worker_id, None)
        shared = endpoint in self._endpoints.values()  # by a new process at the same address
        return [] if endpoint is None or shared else [Disconnect(endpoint)]

    def send_failed(self, key: RequestKey, reason: str) -> list[Action]:
        """A message could not be sent."""
        handoff = self._open_one(key)
        return [] if handoff is None else self._misplaced(handoff, reason)

    def expire(self, now: float) -> list[Action]:
        """Give up what is past its deadline or has stalled."""
        actions: list[Action] = []
        for handoff in [h for h in self._handoffs.values() if h.due() <= now]:
            if handoff.request.deadline <= now:
                report = handoff.failed("deadline", "the request's deadline passed", False)
                actions += self._end(handoff, report)
                continue
            if handoff.state == "queued":
                actions.append(handoff.ask_again(now))
                continue
            peer = handoff.peer
            reason = f"no progress for {handoff.request.stall_timeout_s:g} s"
            actions += self._misplaced(handoff, reason)
            if not any(h.is_open and h.peer == peer for h in self._handoffs.values()):
                actions.append(Disconnect(peer))
        return actions

    def _open(self, handoff: Handoff, reply_to: str, now: float) -> Send:
        assert handoff.target is not None
        self._endpoints[handoff.target.worker_id] = handoff.target.endpoint
        return handoff.open(reply_to, self._worker_id, self._layout, now)

    def _granted(self) -> list[Handoff]:
        return [h for h in self._handoffs.values() if h.state == "granted"]

    def _open_one(self, key: RequestKey) -> Handoff | None:
        handoff = self._handoffs.get(key.request_id)
        return handoff if handoff and handoff.is_open and handoff.request.key == key else None

    def _refused(self, handoff: Handoff, message: m.Refuse) -> list[Action]:
        if message.retriable:
            return self._misplaced(handoff, message.reason, "admission", aborts=False)
        del self._handoffs[handoff.request.key.request_id]
        failed = handoff.failed("admission", message.reason, retriable=False)
        return [Finish(handoff.request.key, failed)]

    def _send_again(self, handoff: Handoff, missing: tuple[m.Region, ...]) -> list[Action]:
        if handoff.resent:
            return self._misplaced(handoff, "KV was incomplete twice")
        handoff.resent = True
        handoff.state = "granted"
        for region in missing:
            handoff.pending.extend(self._split(region))
        return []

    def _disconnect_unused(self) -> list[Action]:
        """A new coordinator never says which decode workers died under the one before."""
        targets = {h.target.worker_id for h in self._handoffs.values() if h.target is not None}
        unused = [worker_id for worker_id in self._endpoints if worker_id not in targets]
        return [action for worker_id in unused for action in self.peer_gone(worker_id)]

    def _misplaced(
        self, handoff: Handoff, reason: str, stage: m.Stage = "transfer", aborts: bool = True
    ) -> list[Action]:
        """The hand-off has failed; the prompt stays, until the coordinator says where it goes."""
        actions = handoff.abort() if aborts else []
        handoff.unplace()
        return [*actions, Report(handoff.failed(stage, reason, kept=True))]

    def _end(self, handoff: Handoff, report: m.HandedOver | m.Failed | None) -> list[Action]:
        key = handoff.request.key
        del self._handoffs[key.request_id]
        return [*handoff.abort(), Finish(key, report)]

    def _split(self, region: m.Region) -> list[m.Region]:
        return list(split_regions(self._layout, region, self._max_frame_bytes))
