"""The KV a decode worker ends up with, against the prefill worker's and an undivided forward."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from decode_worker.worker import DecodeWorker
from kv_transfer.base import KVStore, TransferKey
from kv_transfer.receiver import StoreReceiver
from kv_transfer.tcp import TcpSender
from prefill_worker.worker import PrefillWorker
from splitserve.config import EngineConfig, WorkerConfig
from splitserve.engine.batch import Chunk
from splitserve.engine.model_runner import ModelRunner
from splitserve.membership import Membership
from splitserve.request import Sampling
from splitserve.wire import messages as m
from splitserve.wire.channel import Channel
from splitserve.worker_process import facts_of, make_recorder
from tests.scripted_coordinator import EPOCH, ScriptedCoordinator
from tests.tiny_models import NUM_BYTES, make_tiny_llama

NUM_PROMPTS = 50
CHUNKS = (17, 24, 31, 64)


def whole(store: KVStore, num_tokens: int) -> m.Region:
    layout = store.layout
    return m.Region(0, layout.num_layers, 0, num_tokens, 0, layout.num_kv_heads)


class CapturingSender(TcpSender):
    """Keeps a copy of all KV of a request that had been computed when its last frame left."""

    store: KVStore
    captured: dict[str, bytes]

    def send(self, peer: str, header: m.FrameHeader, block_ids: Sequence[int]) -> int:
        end = header.region.token_end
        self.captured[header.request_id] = bytes(self.store.read(block_ids, whole(self.store, end)))
        return super().send(peer, header, block_ids)


class CapturingReceiver(StoreReceiver):
    """Keeps a copy of a request's KV at the moment its transfer ends."""

    store: KVStore
    captured: dict[str, bytes]
    lengths: dict[TransferKey, tuple[list[int], int]]

    def grant(
        self, key: TransferKey, block_ids: Sequence[int], num_tokens: int, first_token: int = 0
    ) -> None:
        self.lengths[key] = (list(block_ids), num_tokens)
        super().grant(key, block_ids, num_tokens, first_token)

    def revoke(self, key: TransferKey) -> None:
        super().revoke(key)
        block_ids, num_tokens = self.lengths[key]
        region = whole(self.store, num_tokens)
        self.captured[key.request_id] = bytes(self.store.read(block_ids, region))


@dataclass
class Pair:
    """A prefill and a decode worker in this process, over real sockets."""

    coordinator: ScriptedCoordinator
    oracle: ModelRunner
    sent: dict[str, bytes] = field(default_factory=dict)
    arrived: dict[str, bytes] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)
    memberships: list[Membership] = field(default_factory=list)

    def start(self, engine: EngineConfig, chunk: int) -> None:
        for role in ("decode", "prefill"):
            self._start(role, engine, chunk)

    def _start(self, role: str, engine: EngineConfig, chunk: int) -> None:
        import dataclasses

        engine = dataclasses.replace(engine, max_num_batched_tokens=chunk)
        config = WorkerConfig(role, engine, self.coordinator.endpoint, role)  # type: ignore[arg-type]
        runner = ModelRunner.load(engine)
        if role == "decode":
            receiver = CapturingReceiver(runner.kv_cache)
            receiver.store = runner.kv_cache
            receiver.captured, receiver.lengths = self.arrived, {}
            channel = Channel(None, receiver)
        else:
            channel = Channel(None)
        channel.connect_control(config.control_endpoint, role.encode())
        endpoints = (channel.bind_data("127.0.0.1"),) if role == "decode" else ()
        membership = Membership(config, channel, role)
        recorder = make_recorder(runner)
        membership.join(facts_of(config, runner, recorder), endpoints)
        worker: DecodeWorker | PrefillWorker
        if role == "decode":
            worker = DecodeWorker(runner, channel, receiver, membership, recorder)
        else:
            sender = CapturingSender(channel, runner.kv_cache)
            sender.store, sender.captured = runner.kv_cache, self.sent
            worker = PrefillWorker(runner, channel, sender, membership, recorder)
        thread = threading.Thread(target=worker.run, name=role)
        thread.start()
        self.memberships.append(membership)
        self.threads.append(thread)

    def stop(self) -> None:
        for thread in self.threads:  # each has the name of its worker
            self.coordinator.send(thread.name, m.Drain(EPOCH, deadline_s=0.0))
            thread.join(10.0)
            assert not thread.is_alive()
        for membership in self.memberships:
            membership.leave()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one, with enough layers for several frames in flight."""
    return make_tiny_llama(tmp_path_factory.mktemp("deep") / "model", num_hidden_layers=12)


@pytest.fixture(scope="module")
def oracle(model: Path) -> ModelRunner:
    return ModelRunner.load(EngineConfig(str(model), dtype="float32", num_blocks=16))


@pytest.fixture
def coordinator() -> Iterator[ScriptedCoordinator]:
    coordinator = ScriptedCoordinator()
    yield coordinator
    coordinator.close()


def prompts(seed: int, count: int) -> list[tuple[int, ...]]:
    generator = random.Random(seed)
    lengths = [generator.randint(1, 100) for _ in range(count)]
    return [tuple(generator.randrange(NUM_BYTES) for _ in range(n)) for n in lengths]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_kv_is_bit_equal_across_the_hand_off(
    model: Path, oracle: ModelRunner, coordinator: ScriptedCoordinator, chunk: int
) -> None:
    """sgl-project/sglang PR#33970: KV was read before the forward that writes it was over."""
    engine = EngineConfig(str(model), dtype="float32", num_blocks=64, num_threads=1)
    pair = Pair(coordinator, oracle)
    pair.start(engine, chunk)
    try:
        mine = prompts(chunk, NUM_PROMPTS)
        for number, token_ids in enumerate(mine):
            coordinator.send("prefill", prefill_message(str(number), token_ids, coordinator))
        coordinator.wait_for(lambda: len(coordinator.of(m.HandedOver)) == len(mine), "handed over")
        assert not coordinator.of(m.Failed)
        for number, token_ids in enumerate(mine):
            assert pair.arrived[str(number)] == pair.sent[str(number)], f"prompt {number}"
            undivided = undivided_kv(oracle, token_ids)
            arrived = np.frombuffer(pair.arrived[str(number)], np.float32)
            assert np.abs(arrived - undivided).max() < 1e-4
    finally:
        pair.stop()


def prefill_message(
    request_id: str, token_ids: tuple[int, ...], coordinator: ScriptedCoordinator
) -> m.Prefill:
    return m.Prefill(
        request_id,
        0,
        EPOCH,
        token_ids,
        len(token_ids),
        (m.Choice(0, 1),),
        Sampling(max_tokens=2),
        60.0,
        10.0,
        "decode",
        coordinator.hellos["decode"].endpoints[0],
    )


def undivided_kv(runner: ModelRunner, token_ids: tuple[int, ...]) -> np.typing.NDArray[np.float32]:
    """All KV of a prompt computed in one forward pass, flat."""
    block_ids = list(range(16))
    runner.step([Chunk(token_ids, 0, len(token_ids), block_ids)])
    data = runner.kv_cache.read(block_ids, whole(runner.kv_cache, len(token_ids)))
    return np.frombuffer(bytes(data), np.float32)
