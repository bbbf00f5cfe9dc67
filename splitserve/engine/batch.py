"""What one forward pass is told, and the ragged tensors made from it.

Every chunk is a run of tokens of one sequence, [start, end) of its history; the tokens before
start have their KV in the cache already. A decode row is a chunk of one token. Tokens of all
chunks lie one behind the other, without padding:

    chunks      A: start 0, end 5        B: start 41, end 42      C: start 16, end 19
    tokens      a0 a1 a2 a3 a4           b41                      c16 c17 c18
    positions    0  1  2  3  4           41                       16  17  18
    query_starts [0, 5, 6, 9]   query_lens [5, 1, 3]   context_lens [5, 42, 19]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitserve.engine.packing import to_device
from splitserve.request import Sampling

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One token to draw: whose, under which rules, after which history."""

    sampling: Sampling
    seed: int
    choice_id: int
    num_prompt_tokens: int
    token_ids: Sequence[int]  # the whole history, prompt then output


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute tokens [start, end) of a sequence; sample after the last of them if asked.

    `block_ids[i]` holds tokens [i * block_size, (i + 1) * block_size). With several `samples`
    (n > 1) each is drawn from the same logits.
    """

    token_ids: Sequence[int]  # the whole history
    start: int
    end: int
    block_ids: Sequence[int]
    samples: tuple[SampleRow, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The tensors of one forward pass. Metadata that backends plan with stays in numpy."""

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    slot_mapping: Tensor  # int64 [num_tokens]: block_id * block_size + place, where KV is written
    query_starts: Ints  # [num_seqs + 1]
    query_lens: Ints  # [num_seqs]
    context_lens: Ints  # [num_seqs], the chunk included
    block_tables: Ints  # [num_seqs, most blocks]; a row's tail repeats its first block
    logits_rows: Tensor  # int64 [num_sampling_chunks]: tokens that need logits
    sample_rows: Tensor | None  # int64 [num_samples] into logits_rows; None: one each, in order
    block_size: int

    def check(self, vocab_size: int, num_positions: int) -> None:
        """Raise IndexError for what tables of these lengths do not have, of a batch on the host.

        Kernels take token ids and positions as places in memory.
        """
        for what, tensor, limit in (
            ("token id", self.token_ids, vocab_size),
            ("position", self.positions, num_positions),
        ):
            numbers = tensor.numpy()
            low, high = int(numbers.min()), int(numbers.max())
            if low < 0 or high >= limit:
                raise IndexError(f"{what} {low if low < 0 else high} is not in 0 to {limit - 1}")

    def to(self, device: torch.device) -> Batch:
        """A batch on the host with its tensors on the device, by one copy; or itself, if there."""
        if self.positions.device == device:
            return self
        rows = self.token_ids, self.positions, self.slot_mapping, self.logits_rows
        sampled = () if self.sample_rows is None else (self.sample_rows,)
        arrays = [tensor.numpy() for tensor in (*rows, *sampled)]
        token_ids, positions, slots, logits_rows, *there = to_device(arrays, device, torch.int64)
        return replace(
            self,
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slots,
            logits_rows=logits_rows,
            sample_rows=there[0] if there else None,
        )


def build_batch(
    chunks: Sequence[Chunk], block_size: int, device: torch.device | str = "cpu"
) -> Batch:
    """The batch of some chunks, at least one. A history is only looked at in [start, end)."""
    assert chunks, "a batch has at least one chunk"
    starts = np.fromiter((chunk.start for chunk in chunks), np.int64, len(chunks))
    ends = np.fromiter((chunk.end for chunk in chunks), np.int64, len(chunks))
    query_lens = ends - starts
    assert (query_lens > 0).all() and (starts >= 0).all(), "a chunk computes at least one token"
    query_starts = np.zeros(len(chunks) + 1, np.int64)
    np.cumsum(query_lens, out=query_starts[1:])
    tables = _block_tables(chunks, ends, block_size)
    rows = np.repeat(np.arange(len(chunks)), query_lens)
    positions = np.arange(query_starts[-1]) + (starts - query_starts[:-1])[rows]
    blocks = tables[rows, positions // block_size]
    logits_rows, sample_rows = _sampling_rows(chunks, query_starts)

    def tensor(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Batch(
        token_ids=tensor(_token_ids(chunks, query_starts)),
        positions=tensor(positions),
        slot_mapping=tensor(blocks * block_size + positions % block_size),
        query_starts=query_starts,
        query_lens=query_lens,
        context_lens=ends,
        block_tables=tables,
        logits_rows=tensor(logits_rows),
        sample_rows=None if sample_rows is None else tensor(sample_rows),
        block_size=block_size,
    )


def _token_ids(chunks: Sequence[Chunk], query_starts: Ints) -> Ints:
    """Decode rows read one element; only prefill chunks are sliced."""
    parts = (
        (chunk.token_ids[chunk.start],)
        if chunk.end - chunk.start == 1
        else chunk.token_ids[chunk.start : chunk.end]
        for chunk in chunks
    )
    token_ids = np.fromiter(chain.from_iterable(parts), np.int64)
    assert len(token_ids) == query_starts[-1], "a chunk ends behind its history"
    return token_ids


def _block_tables(chunks: Sequence[Chunk], ends: Ints, block_size: int) -> Ints:
    """Block tables as one array. What pads a row is its own first block, never another's KV."""
    needed = -(-ends // block_size)
    held = np.fromiter((len(chunk.block_ids) for chunk in chunks), np.int64, len(chunks))
    assert (held >= needed).all(), "a chunk has too few blocks for its tokens"
    flat = np.fromiter(
        chain.from_iterable(chunk.block_ids for chunk in chunks), np.int64, int(held.sum())
    )
    firsts = np.cumsum(held) - held
    columns = np.arange(needed.max())
    inside = columns < needed[:, None]
    tables: Ints = flat[firsts[:, None] + np.where(inside, columns, 0)]
    return tables


def _sampling_rows(chunks: Sequence[Chunk], query_starts: Ints) -> tuple[Ints, Ints | None]:
    num_samples = np.fromiter((len(chunk.samples) for chunk in chunks), np.int64, len(chunks))
    wanted = num_samples > 0
    logits_rows = query_starts[1:][wanted] - 1
    if (num_samples <= 1).all():
        return logits_rows, None
    return logits_rows, np.repeat(np.arange(len(logits_rows)), num_samples[wanted])
