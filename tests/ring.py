"""Both workers, real sockets and the real protocol, with a fake model that checks all KV."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import xxhash

from decode_worker.worker import DecodeWorker
from kv_transfer.receiver import StoreReceiver
from kv_transfer.tcp import TcpSender
from prefill_worker.worker import PrefillWorker
from splitserve.config import EngineConfig, WorkerConfig
from splitserve.membership import Membership, TerminationRequested
from splitserve.request import Sampling
from splitserve.wire import messages as m
from splitserve.wire.channel import Channel, DataReceived
from tests.fake_recorder import fake_recorder
from tests.fake_runner import LAYOUT, FakeRunner, answer
from tests.scripted_coordinator import ScriptedCoordinator
from tests.waiting import wait_until

TIMEOUT_S = 20.0


class Ring:
    """A scripted coordinator with workers in threads of this process."""

    def __init__(self) -> None:
        self.coordinator = ScriptedCoordinator()
        self.workers: dict[str, Any] = {}
        self._running: dict[str, tuple[Channel, threading.Thread, Membership]] = {}

    def start_decode(self, name: str = "decode", **limits: int) -> FakeRunner:
        runner = FakeRunner(**{"num_blocks": 64, **limits})
        receiver = StoreReceiver(runner.kv_cache)
        channel = Channel(None, receiver)
        membership = self._join(name, "decode", channel, runner)
        parts: Any = (runner, channel, receiver, membership, fake_recorder())
        worker = DecodeWorker(*parts)
        self._run(name, worker, channel, membership)
        return runner

    def start_prefill(
        self, name: str = "prefill", staging_bytes: int = 1 << 26, **limits: int
    ) -> FakeRunner:
        runner = FakeRunner(**{"num_blocks": 64, **limits})
        channel = Channel(None, staging_budget_bytes=staging_bytes)
        membership = self._join(name, "prefill", channel, runner)
        sender = TcpSender(channel, runner.kv_cache)
        parts: Any = (runner, channel, sender, membership, fake_recorder())
        worker = PrefillWorker(*parts)
        self._run(name, worker, channel, membership)
        return runner

    def start_slow_prefill(self, name: str = "prefill") -> FakeRunner:
        """A step of it takes four tokens and 100 ms, until it is told to hurry."""
        runner = self.start_prefill(name, max_num_batched_tokens=4)
        runner.step_s = 0.1
        runner.at_full_speed.clear()
        return runner

    def _join(self, name: str, role: Any, channel: Channel, runner: FakeRunner) -> Membership:
        config = WorkerConfig(role, EngineConfig("fake"), self.coordinator.endpoint, name)
        channel.connect_control(config.control_endpoint, name.encode())
        membership = Membership(config, channel, name)
        endpoints = (channel.bind_data("127.0.0.1"),) if role == "decode" else ()
        membership.join(runner.facts(), endpoints)
        return membership

    def _run(self, name: str, worker: Any, channel: Channel, membership: Membership) -> None:
        thread = threading.Thread(target=worker.run, name=name, daemon=True)
        thread.start()
        self.workers[name] = worker
        self._running[name] = (channel, thread, membership)

    def ask(
        self,
        key: str | tuple[str, int],
        prompt: tuple[int, ...],
        *,
        max_tokens: int = 8,
        seeds: tuple[int, ...] = (1,),
        to: tuple[str, str | None] = ("prefill", "decode"),
        clocks: tuple[float, float] = (60.0, 10.0),
    ) -> None:
        """Send Prefill, for the first attempt or for the one named."""
        request_id, attempt = (key, 0) if isinstance(key, str) else key
        worker, decode = to
        endpoint = None if decode is None else self.coordinator.hellos[decode].endpoints[0]
        choices = tuple(m.Choice(i, seed) for i, seed in enumerate(seeds))
        message = m.Prefill(
            request_id,
            attempt,
            self.coordinator.epoch,
            prompt,
            len(prompt),
            choices,
            Sampling(max_tokens=max_tokens),
            *clocks,
            decode,
            endpoint,
        )
        self.coordinator.send(worker, message)

    def rows(self, request_id: str, choice_id: int = 0) -> dict[int, int]:
        """Tokens of a choice by index, from everyone who spoke of it."""
        found: dict[int, int] = {}
        for message in [*self.coordinator.of(m.FirstToken), *self.coordinator.of(m.Tokens)]:
            for row in message.rows:
                if (row.request_id, row.choice_id) == (request_id, choice_id):
                    for place, token in enumerate(row.tokens, row.first_index):
                        assert found.setdefault(place, token) == token
        return found

    def tokens(self, request_id: str, choice_id: int = 0) -> list[int]:
        rows = self.rows(request_id, choice_id)
        return [rows[place] for place in range(len(rows))]

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(condition, TIMEOUT_S, f"{what}; failed: {self.coordinator.of(m.Failed)}")

    def wait_for_tokens(self, request_id: str, num_tokens: int, choice_id: int = 0) -> None:
        self.wait_for(lambda: len(self.rows(request_id, choice_id)) >= num_tokens, request_id)

    def draining(self, name: str) -> bool:
        beat = self.coordinator.beats.get(name)
        return beat is not None and beat.draining

    def expect_answer(self, request_id: str, prompt: tuple[int, ...], num_tokens: int = 8) -> None:
        self.wait_for_tokens(request_id, num_tokens)
        assert self.tokens(request_id) == answer(prompt, 1, num_tokens)

    def first_failure(self) -> m.Failed:
        self.wait_for(lambda: bool(self.coordinator.of(m.Failed)), "Failed")
        failed = self.coordinator.of(m.Failed)[0]
        assert isinstance(failed, m.Failed)
        return failed

    def num_free(self, name: str) -> int:
        return int(self.workers[name].stats().num_blocks_free)

    def wait_until_empty(self, name: str) -> None:
        total = self.workers[name].blocks.counts.total
        self.wait_for(lambda: self.num_free(name) == total, f"{name} holds nothing")

    def drained(self) -> bool:
        stats = [worker.stats() for worker in self.workers.values()]
        return all(s.num_blocks_free == s.num_blocks_total for s in stats)

    def retarget(self, request_id: str, to: str, attempt: int = 1, worker: str = "prefill") -> None:
        endpoint = self.coordinator.hellos[to].endpoints[0]
        names = (request_id, attempt, self.coordinator.epoch)
        self.coordinator.send(worker, m.Retarget(*names, to, endpoint))

    def release(self, request_id: str, attempt: int = 0) -> None:
        """To everyone, as the coordinator does."""
        for name in self.workers:
            self.coordinator.release(name, request_id, attempt)

    def peer_gone(self, gone: str, reaped: bool = False) -> None:
        for name in self.workers:
            if name != gone:
                self.coordinator.send(name, m.PeerGone(gone, self.coordinator.epoch, reaped))

    def signal(self, name: str) -> None:
        """What SIGTERM does."""
        self._running[name][0].post(TerminationRequested())

    def has_left(self, name: str) -> bool:
        return not self._running[name][1].is_alive()

    def vanish(self, name: str) -> None:
        """The worker is gone, with all it holds and without a word to its peers."""
        self.coordinator.send(name, m.Drain(self.coordinator.epoch, deadline_s=0.0))
        del self.workers[name]
        self._end(name)

    def close(self) -> None:
        for name in self._running:
            self.coordinator.send(name, m.Drain(self.coordinator.epoch, deadline_s=0.0))
        for name in list(self._running):
            self._end(name)
        self.coordinator.close()

    def _end(self, name: str) -> None:
        channel, thread, membership = self._running.pop(name)
        thread.join(10.0)
        membership.leave()
        channel.close()
        assert not thread.is_alive(), name


class RawPrefill:
    """The prefill end of a data channel, driven by a test message by message."""

    def __init__(self, ring: Ring, name: str = "raw", to: str = "decode") -> None:
        self.name = name
        self._to = to
        self._epoch = ring.coordinator.epoch
        self._endpoint = ring.coordinator.hellos[to].endpoints[0]
        self._channel = Channel(None)
        self._answers: list[Any] = []

    def say(self, message: m.PrefillToDecode) -> None:
        self._channel.send_data(self._endpoint, message)

    def open(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        attempt: int = 0,
        clocks: tuple[float, float] = (60.0, 10.0),
    ) -> None:
        layout, sampling = LAYOUT, Sampling(max_tokens=8)
        names = (request_id, attempt, self._epoch, self._to, self.name, self._epoch)
        choices = (m.Choice(0, 1),)
        self.say(m.Open(*names, layout, prompt, len(prompt), choices, sampling, *clocks))

    def frame(self, request_id: str, region: m.Region, data: bytes, attempt: int = 0) -> None:
        checksum = xxhash.xxh3_64_intdigest(data)
        header = m.FrameHeader(request_id, attempt, self._epoch, region, checksum)
        self._channel.send_data(self._endpoint, header, memoryview(data))

    def answer(self, kind: type[Any]) -> Any:
        """The first answer of a kind; what came before it is dropped."""
        deadline = time.monotonic() + TIMEOUT_S
        while (left_s := deadline - time.monotonic()) > 0:
            while self._answers:
                answer = self._answers.pop(0)
                if isinstance(answer, kind):
                    return answer
            events = self._channel.receive(left_s)
            self._answers += [event.message for event in events if isinstance(event, DataReceived)]
        raise AssertionError(f"no {kind.__name__}")

    def close(self) -> None:
        self._channel.close()


@contextmanager
def open_ring() -> Iterator[Ring]:
    """A ring that is empty again at the end of the block, or AssertionError."""
    ring = Ring()
    try:
        yield ring
        ring.wait_for(ring.drained, "every block is free")
        for worker in ring.workers.values():
            worker.blocks.check()
    finally:
        ring.close()


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    generator = random.Random(seed)
    return tuple(generator.randrange(10, 50_000) for _ in range(length))
