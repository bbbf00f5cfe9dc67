"""What a step has to do at least, counted from the model's shapes; and what steps took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from splitserve.config import KVLayout
from splitserve.engine.batch import Ints
from splitserve.engine.models.config import ModelConfig
from splitserve.work import StepSpent, StepWork

Part = Literal["prepare", "forward", "sample"]


@dataclass(frozen=True, slots=True)
class WorkModel:
    """Knows the bytes and FLOPs that no forward pass of one model can do without.

    Counted: every weight once a step, but of the embedding only the rows looked up; keys and
    values; linears and attention. Not counted, for a fused pass could keep them in registers and
    caches: activations, norms, rotations, softmax, biases' additions.
    """

    layer_bytes: int  # weights of all layers: matrices, biases, norms
    head_bytes: int  # the last norm and the LM head, for steps that want logits
    embedding_row_bytes: int
    kv_token_bytes: int  # keys and values of a token, all layers
    token_flops: int  # of all layers' linears
    pair_flops: int  # of a query and a key that it sees, all heads and layers
    logits_row_flops: int

    @classmethod
    def from_shapes(cls, model: ModelConfig, layout: KVLayout, dtype: torch.dtype) -> WorkModel:
        """`dtype` is that of the weights."""
        hidden, vocab = model.hidden_size, model.vocab_size
        matrices = model.num_layers * _num_matrix_parameters(model)
        vectors = model.num_layers * _num_vector_parameters(model)
        return cls(
            layer_bytes=(matrices + vectors) * dtype.itemsize,
            head_bytes=(hidden + vocab * hidden) * dtype.itemsize,
            embedding_row_bytes=hidden * max(dtype.itemsize, 2),  # int8 is for products only
            kv_token_bytes=layout.token_bytes,
            token_flops=2 * matrices,
            pair_flops=4 * model.num_layers * model.num_heads * model.head_dim,
            logits_row_flops=2 * vocab * hidden,
        )

    @property
    def weight_bytes(self) -> int:
        """What a step with logits reads of the weights, beside the rows of its embedding."""
        return self.layer_bytes + self.head_bytes

    def of(self, query_lens: Ints, context_lens: Ints, num_logits_rows: int) -> StepWork:
        """The work of one pass; lengths [num_seqs] as in Batch, in tokens.

        A token sees all before it and itself: a window, where the model has one, is never shorter
        than the longest context that is accepted.
        """
        # In Python: after a step, whose weights fill the caches, each call of numpy costs as much
        # as dozens of these sums.
        queries, contexts = query_lens.tolist(), context_lens.tolist()
        num_tokens = sum(queries)
        num_kv_tokens = sum(contexts) + num_tokens  # read, written
        num_pairs = sum(q * (2 * c - q + 1) for q, c in zip(queries, contexts, strict=True)) // 2
        return StepWork(
            num_bytes=self.layer_bytes
            + (self.head_bytes if num_logits_rows else 0)
            + num_tokens * self.embedding_row_bytes
            + num_kv_tokens * self.kv_token_bytes,
            num_flops=num_tokens * self.token_flops
            + num_pairs * self.pair_flops
            + num_logits_rows * self.logits_row_flops,
        )


def _num_matrix_parameters(model: ModelConfig) -> int:
    """Of one layer."""
    hidden, inner = model.hidden_size, model.num_heads * model.head_dim
    num_qkv_rows = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    return hidden * (num_qkv_rows + inner + 3 * model.intermediate_size)


def _num_vector_parameters(model: ModelConfig) -> int:
    """Biases and norms of one layer."""
    num_qkv_rows = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    return (
        2 * model.hidden_size
        + model.qkv_bias * num_qkv_rows
        + model.output_bias * model.hidden_size
        + model.mlp_bias * (2 * model.intermediate_size + model.hidden_size)
        + model.qk_norm * 2 * model.head_dim
    )


class StepMeter:
    """Owns what passes took, and what they did, since somebody last asked."""

    def __init__(self) -> None:
        self._spent_s: dict[Part, float] = {"prepare": 0.0, "forward": 0.0, "sample": 0.0}
        self._work = StepWork()

    @contextmanager
    def during(self, part: Part) -> Iterator[None]:
        """What the block takes counts as `part`, also when it raises."""
        started_at = time.perf_counter()
        try:
            yield
        finally:
            self._spent_s[part] += time.perf_counter() - started_at

    def did(self, work: StepWork) -> None:
        self._work += work

    def take(self) -> StepSpent:
        """The sums since the last call; they start anew."""
        spent_s, work = self._spent_s, self._work
        self._spent_s, self._work = dict.fromkeys(spent_s, 0.0), StepWork()
        return StepSpent(spent_s["prepare"], spent_s["forward"], spent_s["sample"], work)


class CudaStepMeter(StepMeter):
    """Owns the same by a GPU's own clock: a host clock would time launches only.

    The parts follow each other on one stream and end with a wait for the tokens, so that work of
    the host in between, which leaves the stream empty, counts just as work of the GPU does. Each
    part is an NVTX range of its name, for Nsight Systems.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._unread: list[tuple[Part, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def during(self, part: Part) -> Iterator[None]:
        stream = torch.cuda.current_stream(self._device)
        began, ended = _event(), _event()
        with torch.cuda.nvtx.range(part):
            began.record(stream)
            try:
                yield
            finally:
                ended.record(stream)
                self._unread.append((part, began, ended))

    def take(self) -> StepSpent:
        """As of the other meter. Waits for parts of which nobody has awaited the end."""
        for part, began, ended in self._unread:
            ended.synchronize()
            self._spent_s[part] += began.elapsed_time(ended) / 1000  # of ms
        self._unread.clear()
        return super().take()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def meter_for(device: torch.device) -> StepMeter:
    """The meter whose clock sees what happens on `device`."""
    return CudaStepMeter(device) if device.type == "cuda" else StepMeter()
