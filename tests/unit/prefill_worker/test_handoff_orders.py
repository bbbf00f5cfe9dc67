"""Answers, Retargets, Releases and deaths in every order that hypothesis thinks of."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefill_worker.handoff import (
    Action,
    Disconnect,
    Finish,
    Rekey,
    Report,
    Send,
    SendFrame,
    Target,
)
from prefill_worker.handoffs import Handoffs
from prefill_worker.scheduler import PrefillScheduler
from splitserve.request import Sampling
from splitserve.scheduling.block_manager import BlockManager
from splitserve.scheduling.prefix_cache import PrefixCache
from splitserve.scheduling.sequence import Request, RequestKey
from splitserve.wire import messages as m
from tests.unit.requests import LAYOUT

NAMES = st.sampled_from(["a", "b", "c"])
WORKERS = st.sampled_from(["d0", "d1"])
LENGTHS = {"a": 3, "b": 9, "c": 14}
DEADLINE_S, STALL_S = 50.0, 5.0


class Prefill(RuleBasedStateMachine):
    """A prefill worker without sockets, tensors and time."""

    keeps_prefixes = False

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.blocks = BlockManager(6)
        cache = PrefixCache(self.blocks, LAYOUT.block_size, self.keeps_prefixes)
        self.scheduler = PrefillScheduler(self.blocks, LAYOUT.block_size, 4, cache)
        self.handoffs = Handoffs("p", LAYOUT, 200)
        self.next_attempt = dict.fromkeys(LENGTHS, 0)
        self.aborted: set[RequestKey] = set()
        self.told: dict[RequestKey, str] = {}  # what decode workers know of, by the peer
        self.sent: dict[RequestKey, set[tuple[int, int]]] = {}  # (layer, token)
        self.ended: set[RequestKey] = set()

    # -- what a worker does with actions ---------------------------------------------------------

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(peer, message):
                    self.send(peer, message)
                case SendFrame(peer, key, _, region):
                    assert self.told[key] == peer
                    assert self.scheduler.block_ids(key.request_id)
                    layers = range(region.layer_start, region.layer_end)
                    tokens = range(region.token_start, region.token_end)
                    self.sent[key] |= {(layer, token) for layer in layers for token in tokens}
                    self.handoffs.sent(key, self.now)
                case Finish(key):
                    assert self.scheduler.release(key.request_id)
                    self.told.pop(key, None)
                    self.ended.add(key)
                case Rekey(_, request):
                    self.scheduler.rekey(request)
                case Report(message):
                    assert message.retriable
                    assert message.kept == (self.attempt(message.request_id) == message.attempt)
                case Disconnect():
                    pass

    def send(self, peer: str, message: Any) -> None:
        key = RequestKey(message.request_id, message.attempt)
        if isinstance(message, m.Open):
            assert self.told.get(key, peer) == peer and key not in self.ended
            assert key not in self.aborted, "nobody would take it"
            self.told[key], self.sent[key] = peer, set()
            return
        if isinstance(message, m.Abort):
            assert self.told.pop(key, peer) == peer
            self.aborted.add(key)
            return
        assert self.told[key] == peer
        if isinstance(message, m.Commit):
            whole = LAYOUT.num_layers * LENGTHS[key.request_id]
            assert len(self.sent[key]) == whole, "a Commit without all KV"
            assert {row.attempt for row in message.first_tokens} == {key.attempt}

    def attempt(self, name: str) -> int | None:
        return self.handoffs.attempt_of(name)

    # -- what comes in ---------------------------------------------------------------------------

    @rule(name=NAMES, worker=WORKERS, max_tokens=st.sampled_from([1, 8]))
    def prefill(self, name: str, worker: str, max_tokens: int) -> None:
        key = RequestKey(name, self.next_attempt[name])
        self.next_attempt[name] += 1
        length, deadline = LENGTHS[name], self.now + DEADLINE_S
        request = Request(
            key=key,
            epoch="epoch",
            token_ids=tuple(range(length)),
            num_prompt_tokens=length,
            choices=(m.Choice(0, 1),),
            sampling=Sampling(max_tokens=max_tokens),
            deadline=deadline,
            stall_timeout_s=STALL_S,
        )
        self.act(self.handoffs.release(key))
        self.handoffs.add(request, Target(worker, f"tcp://{worker}"), self.now)
        self.scheduler.submit(request)

    @rule(name=NAMES, worker=WORKERS)
    def retarget(self, name: str, worker: str) -> None:
        attempt = self.next_attempt[name]
        self.next_attempt[name] += 1
        message = m.Retarget(name, attempt, "epoch", worker, f"tcp://{worker}")
        was_here = self.attempt(name) is not None
        self.act(self.handoffs.retarget(message, "reply", self.now))
        assert self.attempt(name) == (attempt if was_here else None)

    @rule(
        name=NAMES,
        back=st.sampled_from([0, 0, 0, 0, 1]),
        kind=st.sampled_from([m.Grant, m.Grant, m.Grant, m.Queued, m.Received, m.AbortAck]),
    )
    def answer(self, name: str, back: int, kind: Any) -> None:
        names = (name, max(0, self.next_attempt[name] - 1 - back), "epoch")
        message = m.Grant(*names, 0) if kind is m.Grant else kind(*names)
        self.hear(message)

    @rule(name=NAMES, retriable=st.booleans())
    def refuse(self, name: str, retriable: bool) -> None:
        attempt = max(0, self.next_attempt[name] - 1)
        self.hear(m.Refuse(name, attempt, "epoch", "no", retriable))

    @rule(name=NAMES, token=st.integers(0, 2))
    def incomplete(self, name: str, token: int) -> None:
        attempt = max(0, self.next_attempt[name] - 1)
        missing = (m.Region(0, 3, token, token + 1, 0, 2),)
        self.hear(m.Incomplete(name, attempt, "epoch", missing))

    def hear(self, message: Any) -> None:
        """Only who was told of an attempt answers; it forgets what it says it won't have."""
        key = RequestKey(message.request_id, message.attempt)
        if key.attempt >= self.next_attempt[key.request_id]:
            return  # nobody has heard of it
        if isinstance(message, m.Refuse | m.AbortAck):
            self.told.pop(key, None)
        peer = self.told.get(key, "tcp://d0")
        self.act(self.handoffs.handle(peer, message, self.now))

    @rule(name=NAMES, back=st.integers(0, 1))
    def release(self, name: str, back: int) -> None:
        key = RequestKey(name, max(0, self.next_attempt[name] - 1 - back))
        self.act(self.handoffs.release(key))
        left = self.attempt(name)
        assert left is None or left > key.attempt

    @rule(worker=WORKERS)
    def peer_gone(self, worker: str) -> None:
        self.told = {k: peer for k, peer in self.told.items() if peer != f"tcp://{worker}"}
        self.act(self.handoffs.peer_gone(worker))

    # -- what the worker does by itself ----------------------------------------------------------

    @rule(num_bytes=st.sampled_from([100, 1 << 20]))
    def turn(self, num_bytes: int) -> None:
        """Admit, compute a step, push."""
        for sequence in self.scheduler.admit():
            key, num_cached = sequence.request.key, sequence.num_cached
            self.act(self.handoffs.open(key, "reply", self.now, num_cached))
        self.act(self.handoffs.before_step(self.now))
        plan = self.scheduler.schedule()
        self.scheduler.computed(plan)
        for chunk in plan:
            request = chunk.sequence.request
            self.handoffs.computed(request.key, chunk.end)
            if chunk.samples:
                rows = [m.TokenRow(*request.key, 0, 0, (5,))]
                unfinished = rows if request.sampling.max_tokens > 1 else []
                self.act(self.handoffs.prompt_finished(request.key, unfinished, self.now))
        self.act(self.handoffs.pump(lambda _: num_bytes))

    @rule(seconds=st.sampled_from([0.1, STALL_S, DEADLINE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.act(self.handoffs.expire(self.now))

    # -- what must hold --------------------------------------------------------------------------

    @invariant()
    def every_prompt_has_one_hand_off_and_its_blocks(self) -> None:
        self.blocks.check()
        num_prompts = self.scheduler.num_waiting + self.scheduler.num_computing
        assert num_prompts <= len(self.handoffs)
        assert bool(self.handoffs) != self.scheduler.idle

    @invariant()
    def decode_workers_know_of_what_is_open_and_of_nothing_else(self) -> None:
        held = self.handoffs.keys
        assert set(self.told) <= set(held)
        assert self.handoffs.num_in_flight <= len(self.told)

    @invariant()
    def nothing_waits_without_an_end(self) -> None:
        due = self.handoffs.due()
        assert not self.handoffs or (due is not None and due <= self.now + DEADLINE_S)

    def teardown(self) -> None:
        self.act(self.handoffs.keep_only(()))
        assert self.told == {}
        assert self.scheduler.idle
        assert self.blocks.counts.free + self.blocks.counts.cached == self.blocks.counts.total
        assert self.keeps_prefixes or self.blocks.counts.cached == 0


class CachingPrefill(Prefill):
    """All prompts begin alike."""

    keeps_prefixes = True


ENOUGH = settings(max_examples=150, stateful_step_count=40, deadline=None)
Prefill.TestCase.settings = CachingPrefill.TestCase.settings = ENOUGH
TestPrefill = Prefill.TestCase
TestCachingPrefill = CachingPrefill.TestCase
