"""Decode passes by size, each captured before the first request comes.

A batch takes the smallest pass that it fits into, and its rows are followed by rows that pad. There
is one for each number of rows that is a power of two, and for each of a few context lengths: with
the longest, attention has programs for 64 parts of every context, and block tables are wide.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from splitserve.engine.attention.base import AttentionPlan
from splitserve.engine.attention.triton_backend import TritonAttention
from splitserve.engine.batch import Batch
from splitserve.engine.gpu.graphs import Graphs, Run
from splitserve.engine.gpu.rows import PaddedRows, Tokens

_CONTEXTS = (1024, 8192)

Forward = Callable[[Tokens, AttentionPlan], Tensor]  # logits [num_tokens, vocab]


@dataclass(frozen=True, slots=True)
class Limits:
    """Of what a decode batch can be."""

    max_num_seqs: int
    max_model_len: int
    block_size: int

    @property
    def num_rows(self) -> list[int]:
        """How many rows passes have, ascending."""
        powers = (1 << i for i in itertools.count())
        smaller = itertools.takewhile(lambda power: power < self.max_num_seqs, powers)
        return [*smaller, self.max_num_seqs]

    @property
    def contexts(self) -> list[int]:
        """How many tokens the contexts of passes have at most, ascending."""
        return [*(n for n in _CONTEXTS if n < self.max_model_len), self.max_model_len]


class DecodePasses:
    """Owns the captured passes of one decoder over one cache."""

    def __init__(
        self, forward: Forward, attention: TritonAttention, limits: Limits, device: torch.device
    ) -> None:
        self._forward, self._attention = forward, attention
        self._limits = limits
        graphs = Graphs(device)
        sizes = itertools.product(reversed(limits.num_rows), reversed(limits.contexts))
        self._passes: dict[tuple[int, int], tuple[PaddedRows, Run]] = {}
        for num_rows, context in sizes:
            rows = PaddedRows(num_rows, context, limits.block_size, device)
            self._passes[num_rows, context] = rows, graphs.capture(self._run_over(rows))

    def run(self, batch: Batch) -> Tensor | None:
        """Logits [logits_rows, vocab] of a batch on the host; None for one that no pass takes."""
        num_seqs, longest = len(batch.query_lens), int(batch.context_lens.max())
        limits = self._limits
        if batch.query_starts[-1] != num_seqs or num_seqs > limits.max_num_seqs:
            return None
        if longest > limits.max_model_len:
            return None
        num_rows = next(n for n in limits.num_rows if n >= num_seqs)
        context = next(n for n in limits.contexts if n >= longest)
        rows, run = self._passes[num_rows, context]
        rows.load(batch)
        logits = run()
        if len(batch.logits_rows) == num_seqs:
            return logits[:num_seqs].clone()  # the next run overwrites it
        return logits.index_select(0, batch.logits_rows.to(logits.device))

    def _run_over(self, rows: PaddedRows) -> Run:
        def run() -> Tensor:
            # Made here, so that what parts of contexts leave is in the memory all graphs share.
            plan = self._attention.decode_plan(rows.attended, rows.most_tokens)
            return self._forward(rows.tokens, plan)

        return run
