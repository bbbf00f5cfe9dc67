"""What comes in of prompts, on both channels and in whatever order. Pure.

A hand-off and its end come from two sides: Open and Abort from a prefill worker, Release from the
coordinator. Here they meet. At any time there is one attempt at a request at most, a newer one ends
it, and nothing is taken of one that is over.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from decode_worker.incoming import Action, Reply, Report, Sender
from decode_worker.intake import Intake
from decode_worker.refusals import Here, Refusal, mismatch
from decode_worker.scheduler import DecodeScheduler
from decode_worker.tombstones import UNKNOWN_DEADLINE_S, Tombstones
from splitserve.draining import Draining
from splitserve.scheduling.prompt_clock import PromptClock
from splitserve.scheduling.sequence import Request, RequestKey, impossible
from splitserve.wire import messages as m


@dataclass(slots=True)
class Reception:
    """Owns which attempts are here, and which are over."""

    intake: Intake
    scheduler: DecodeScheduler
    prompts: PromptClock
    draining: Draining
    here: Here
    tombstones: Tombstones = field(default_factory=Tombstones)

    def held(self) -> list[RequestKey]:
        """Every attempt that something is here of."""
        answers = dict.fromkeys(s.request.key for s in self.scheduler.sequences)
        return [*answers, *self.intake.keys]

    def prefill(self, message: m.Prefill, now: float) -> list[Action]:
        """The coordinator wants a prompt computed here. `now` is when its word came."""
        request = Request.of(message, now)
        held = self._held(message.request_id)
        if held is not None and held.key.attempt >= message.attempt:
            return []
        if self.tombstones.cover(request.key, now):
            return []
        actions, refusal = self._make_way(request, message, now)
        if refusal is not None:
            failed = m.Failed(*request.key, request.epoch, "admission", *refusal)
            return [*actions, Report(failed)]
        self.prompts.arrived(request.key, now)
        self.intake.add(request, None)
        return actions

    def handle(
        self,
        peer: str,
        message: m.PrefillToDecode | m.DecodeToPrefill,
        now: float,
        at: float | None = None,
    ) -> list[Action]:
        """A message of a prefill worker, which came `at`: now, unless the loop was busy.

        What is not held is answered with AbortAck.
        """
        key = RequestKey(message.request_id, message.attempt)
        actions: list[Action] | None = None
        match message:
            case m.Open():
                actions = self._open(peer, message, now)
            case m.Computing():
                actions = self.intake.computing(message, now)
            case m.Computed():
                actions = self.intake.computed(message)
            case m.Commit():
                actions = self.intake.commit(message, now, at)
            case m.Abort() if self._begun(key):
                # All of its KV is here, and Received was lost. Only the coordinator ends an answer
                # that is being written.
                return [Reply(peer, m.Received(*key, epoch=message.epoch))]
            case m.Abort():
                held = self._held(key.request_id)
                until = now + UNKNOWN_DEADLINE_S if held is None else held.deadline
                overtaken = self._overtake(key, until, now)
                ack = Reply(peer, m.AbortAck(*key, epoch=message.epoch))
                return [*overtaken, *self.end(key, until, now), ack]
        return [Reply(peer, m.AbortAck(*key, epoch=message.epoch))] if actions is None else actions

    def end(self, key: RequestKey, until: float, now: float) -> list[Action]:
        """This attempt and those before it are over: nothing of them is taken before `until`."""
        self.tombstones.bury(key, until, now)
        return self.forget(key)

    def forget(self, key: RequestKey) -> list[Action]:
        """Free what is here of this attempt or one before it."""
        held = self._held(key.request_id)
        if held is None or held.key.attempt > key.attempt:
            return []
        self.scheduler.release(key)
        self.prompts.forget(held.key)
        return self.intake.release(key)

    def keep_only(self, keep: Collection[RequestKey]) -> list[Action]:
        """Forget everything else."""
        gone = [key for key in self.held() if key not in keep]
        return [action for key in gone for action in self.forget(key)]

    def _open(self, peer: str, message: m.Open, now: float) -> list[Action] | None:
        request = Request.of(message, now)
        if self.tombstones.cover(request.key, now):
            return None
        here = self.intake.incoming(message.request_id)
        if here is not None and here.request.key == request.key and here.comes_from(peer):
            return [here.answer()]  # it came twice
        actions, refusal = self._make_way(request, message, now)
        if refusal is not None:
            return [*actions, Reply(peer, m.Refuse(*request.key, request.epoch, *refusal))]
        self.intake.add(request, Sender(message.from_worker_id, peer))
        return actions

    def _make_way(
        self, request: Request, message: m.Open | m.Prefill, now: float
    ) -> tuple[list[Action], Refusal | None]:
        """End the attempts before this one, and say why it can't be taken, if it can't."""
        refusal = mismatch(message, self.here)
        if refusal is not None:
            return [], refusal
        actions = self._overtake(request.key, request.deadline, now)
        return actions, self._refusal(request, message)

    def _overtake(self, key: RequestKey, until: float, now: float) -> list[Action]:
        """End the attempts before this one. Whoever was sending one hears it."""
        if key.attempt == 0:
            return []
        older = self.intake.incoming(key.request_id)
        actions = self.end(key._replace(attempt=key.attempt - 1), until, now)
        if older is not None and older.sender is not None and older.request.key < key:
            ack = m.AbortAck(*older.request.key, epoch=older.request.epoch)
            actions.append(Reply(older.sender.peer, ack))
        return actions

    def _refusal(self, request: Request, message: m.Open | m.Prefill) -> Refusal | None:
        if isinstance(message, m.Open) and self.intake.is_gone(message.from_worker_id):
            return f"prefill worker {message.from_worker_id} is dead to the cluster", True
        if self.draining.started:
            return f"decode worker {self.here.worker_id} is draining", True
        if self._held(message.request_id) is not None:
            return "this attempt is already here", False
        limits = self.intake.limits
        if reason := impossible(request, limits.max_model_len, limits.vocab_size):
            return reason, False
        if self.intake.never_fits(request):
            num_tokens, num_blocks = len(request.token_ids), self.intake.blocks.counts.total
            return f"{num_tokens} tokens never fit in {num_blocks} blocks", False
        return None

    def _begun(self, key: RequestKey) -> bool:
        return any(sequence.request.key == key for sequence in self.scheduler.sequences)

    def _held(self, request_id: str) -> Request | None:
        """The one attempt at a request that is here."""
        for sequence in self.scheduler.sequences:
            if sequence.request.key.request_id == request_id:
                return sequence.request
        incoming = self.intake.incoming(request_id)
        return None if incoming is None else incoming.request
