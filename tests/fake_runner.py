"""A model runner without a model: it checks the KV it would attend to, then draws by arithmetic."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from splitserve.config import EngineConfig, Fingerprint, KVLayout
from splitserve.engine.batch import Chunk, SampleRow
from splitserve.engine.step_work import StepMeter, WorkModel
from splitserve.request import SampledToken
from splitserve.wire.messages import Region, WorkerFacts
from splitserve.work import Operation, StepSpent
from tests.fake_store import FakeStore, whole

LAYOUT = KVLayout("float32", num_layers=3, num_kv_heads=2, head_dim=2, block_size=4)
VOCAB_SIZE = 50_000
WORK = WorkModel(
    layer_bytes=1_000_000,
    head_bytes=100_000,
    embedding_row_bytes=8,
    kv_token_bytes=LAYOUT.token_bytes,
    token_flops=2_000_000,
    pair_flops=100,
    logits_row_flops=200_000,
)


def next_token(history: Sequence[int], seed: int) -> int:
    """What the fake model says after a history: any change of it changes the answer."""
    data = np.asarray([seed, *history], np.int64).tobytes()
    return 10 + zlib.crc32(data) % (VOCAB_SIZE - 10)


def answer(prompt: Sequence[int], seed: int, num_tokens: int) -> list[int]:
    """The first tokens of the fake model's answer to a prompt."""
    history = list(prompt)
    for _ in range(num_tokens):
        history.append(next_token(history, seed))
    return history[len(prompt) :]


class WrongKV(AssertionError):
    """A block does not hold what was computed for this sequence."""


@dataclass
class FakeRunner:
    """Looks like splitserve.engine's ModelRunner. The KV of a token is its id and its position."""

    num_blocks: int
    max_num_batched_tokens: int = 32
    max_num_seqs: int = 64
    max_model_len: int = 4096

    def __post_init__(self) -> None:
        self.layout = LAYOUT
        self.vocab_size = VOCAB_SIZE
        self.work_model = WORK
        self.kv_cache = FakeStore(LAYOUT, self.num_blocks)
        self.config = EngineConfig("fake", max_num_seqs=self.max_num_seqs)
        self.copies: list[tuple[int, int]] = []
        self._meter = StepMeter()
        self._num_traced_steps = 0  # still to come
        self._kernels: list[Operation] = []
        self.step_s = 0.02
        self.at_full_speed = threading.Event()  # cleared: a step takes `step_s`
        self.at_full_speed.set()

    def facts(self) -> WorkerFacts:
        same = Fingerprint("w", "c", "t")
        limits = (self.num_blocks, self.max_num_seqs, self.max_num_batched_tokens)
        return WorkerFacts(*limits, self.max_model_len, LAYOUT, same, 1, "cpu")

    def step(self, chunks: Sequence[Chunk]) -> list[tuple[SampledToken, ...]]:
        with self._meter.during("prepare"):
            ends = np.array([chunk.end for chunk in chunks])
            query_lens = ends - np.array([chunk.start for chunk in chunks])
        with self._meter.during("forward"):
            began = time.monotonic()
            self.at_full_speed.wait(self.step_s)
            for chunk in chunks:
                self._compute(chunk)
            self._trace(began)
        num_logits_rows = sum(bool(chunk.samples) for chunk in chunks)
        self._meter.did(self.work_model.of(query_lens, ends, num_logits_rows))
        with self._meter.during("sample"):
            return [tuple(self._sample(row) for row in chunk.samples) for chunk in chunks]

    def take_spent(self) -> StepSpent:
        return self._meter.take()

    def trace_next(self, num_steps: int) -> None:
        self._num_traced_steps = num_steps

    def take_kernels(self) -> tuple[list[Operation], int]:
        kernels, self._kernels = self._kernels, []
        return kernels, 0

    def _trace(self, began: float) -> None:
        if self._num_traced_steps:
            self._num_traced_steps -= 1
            self._kernels.append(Operation("fake::step", began, time.monotonic() - began))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.kv_cache.blocks[target] = self.kv_cache.blocks[source]
            self.copies.append((source, target))

    def _compute(self, chunk: Chunk) -> None:
        self._check(chunk.token_ids, chunk.start, chunk.block_ids)
        layers, heads = LAYOUT.num_layers, LAYOUT.num_kv_heads
        region = Region(0, layers, chunk.start, chunk.end, 0, heads)
        values = self._kv(chunk.token_ids, chunk.start, chunk.end)
        self.kv_cache.write(chunk.block_ids, region, memoryview(values.tobytes()))

    def _check(self, token_ids: Sequence[int], num_tokens: int, block_ids: Sequence[int]) -> None:
        if num_tokens == 0:
            return
        held = self.kv_cache.tokens(block_ids, whole(LAYOUT, num_tokens))
        if not np.array_equal(held, self._kv(token_ids, 0, num_tokens)):
            raise WrongKV(f"blocks {list(block_ids)} of {num_tokens} tokens")

    def _kv(self, token_ids: Sequence[int], start: int, end: int) -> np.typing.NDArray[np.uint32]:
        shape = (LAYOUT.num_layers, 2, end - start, LAYOUT.num_kv_heads, LAYOUT.head_dim)
        places = np.arange(start, end, dtype=np.uint32)
        tokens = np.asarray(token_ids[start:end], np.uint32) * np.uint32(4096) + places
        return np.ascontiguousarray(np.broadcast_to(tokens[None, None, :, None, None], shape))

    def _sample(self, row: SampleRow) -> SampledToken:
        return SampledToken(next_token(row.token_ids, row.seed))
