"""A model, its KV cache and its sampler behind one call: a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from splitserve.config import EngineConfig
from splitserve.engine.batch import Chunk, SampleRow, build_batch
from splitserve.engine.cpu.decoder import CpuDecoder
from splitserve.engine.kernel_trace import KernelTrace
from splitserve.engine.kv_cache import DTYPES
from splitserve.engine.loading import Loaded, load
from splitserve.engine.resolve import resolve_device
from splitserve.engine.sampler import sample
from splitserve.engine.step_work import WorkModel, meter_for
from splitserve.request import SampledToken, Sampling
from splitserve.work import Operation, StepSpent

_WARM_UP_TOKENS = 64


class ModelRunner:
    """Owns the weights and the KV cache. One thread steps it at a time."""

    def __init__(self, loaded: Loaded) -> None:
        config, model, kv_cache = loaded.config, loaded.model, loaded.kv_cache
        self.config = config
        self.kv_cache = kv_cache
        self.device = kv_cache.tensor.device
        self.layout = kv_cache.layout
        self.num_blocks = kv_cache.num_blocks
        self.vocab_size = model.vocab_size
        quantized = config.quantization == "int8"
        weight_dtype = torch.int8 if quantized else DTYPES[config.dtype]
        self.work_model = WorkModel.from_shapes(model, self.layout, weight_dtype)
        self._decoder = loaded.decoder
        self._capture = loaded.capture
        self._meter = meter_for(self.device)
        self._trace = KernelTrace(on_gpu=self.device.type == "cuda")

    @classmethod
    def load(cls, config: EngineConfig, device: str = "cpu") -> ModelRunner:
        """Load a Hugging Face directory to "cpu" or "cuda:N"; see loading.py.

        Raises ConfigError, by name, for what this engine can't run, and for values that can't
        work.
        """
        return cls(load(config, resolve_device(device)))

    @property
    def max_model_len(self) -> int:
        assert self.config.max_model_len is not None
        return self.config.max_model_len

    @property
    def max_num_batched_tokens(self) -> int:
        assert self.config.max_num_batched_tokens is not None
        return self.config.max_num_batched_tokens

    @property
    def num_threads(self) -> int:
        assert self.config.num_threads is not None
        return self.config.num_threads

    def step(self, chunks: Sequence[Chunk]) -> list[tuple[SampledToken, ...]]:
        """Compute every chunk, at least one. One tuple each: a token for each of its samples.

        Nothing of it is still being computed when this returns or raises, so that blocks may be
        given to others then.
        """
        with self._trace.step() as watched, self._until_done():
            logits = self.logits(chunks)
            if watched and isinstance(self._decoder, CpuDecoder):
                self._trace.add(self._decoder.operations())
            rows = [row for chunk in chunks for row in chunk.samples]
            with self._meter.during("sample"), torch.inference_mode():
                tokens = iter(sample(logits, rows) if rows else [])
        return [tuple(next(tokens) for _ in chunk.samples) for chunk in chunks]

    @contextmanager
    def _until_done(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()

    @torch.inference_mode()
    def logits(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute every chunk; logits [num_samples, vocab], in order."""
        with self._meter.during("prepare"):
            batch = build_batch(chunks, self.layout.block_size)
        with self._meter.during("forward"):
            logits = self._decoder(batch, self.kv_cache.tensor)
            if batch.sample_rows is not None:
                logits = logits[batch.sample_rows]
        self._meter.did(
            self.work_model.of(batch.query_lens, batch.context_lens, len(batch.logits_rows))
        )
        return logits

    def take_spent(self) -> StepSpent:
        """What all passes since the last call took and did; of one that failed, what it took."""
        return self._meter.take()

    def trace_next(self, num_steps: int) -> None:
        """Watch the operations of the next steps, which makes those slower; 0 ends it."""
        self._trace.watch(num_steps)

    def take_kernels(self) -> tuple[list[Operation], int]:
        """Those of watched steps since the last call, and how many there was no room for."""
        return self._trace.take()

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), before the next step."""
        self.kv_cache.copy_blocks(pairs)

    def warm_up(self) -> None:
        """A real prefill, then a decode row beside another prefill; all that else may be compiled
        or captured; the cache is zeros again.

        For an idle runner only: it writes into the first blocks.
        """
        capacity = self.num_blocks * self.layout.block_size
        num_tokens = min(_WARM_UP_TOKENS, capacity, self.max_model_len)
        history = [token % self.vocab_size for token in range(num_tokens)]
        blocks = range(-(-num_tokens // self.layout.block_size))
        row = SampleRow(Sampling(max_tokens=1), 0, 0, num_tokens, history)
        prefill = Chunk(history, 0, num_tokens, blocks, (row,))
        self.step([prefill])
        self.step([Chunk(history, num_tokens - 1, num_tokens, blocks, (row,)), prefill])
        self.kv_cache.warm_up()
        if self._capture is not None:
            with torch.inference_mode():
                self._capture()
        self.kv_cache.tensor[:, :, : len(blocks)] = 0
        self.take_spent()  # it was no step of anybody's
