"""What a decode pass that is run again and again reads: tensors that stay where they are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from splitserve.engine.batch import Batch
from splitserve.engine.packing import borders, staged
from splitserve.engine.triton_kernels.decode import DecodeRows

_NOWHERE = -1  # the slot of a token whose KV is not written


class Tokens(NamedTuple):
    """The tokens of a pass, on its device."""

    token_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    slot_mapping: Tensor  # int32 [num_tokens], as in Batch; -1: a token that pads


class PaddedRows:
    """Owns the tokens and block tables of up to `num_rows` decode rows, as one tensor.

        [ token ids | positions | slots | context lens | block tables, row by row ]

    Rows that pad have no context and are written nowhere, which is what all are at first.
    """

    def __init__(
        self, num_rows: int, most_tokens: int, block_size: int, device: torch.device
    ) -> None:
        self.num_rows, self.most_tokens = num_rows, most_tokens
        self._width = -(-most_tokens // block_size)
        sizes = (*(num_rows,) * 4, num_rows * self._width)
        self._starts, length = borders(sizes, torch.int32)
        self._there = torch.zeros(length, dtype=torch.int32, device=device)
        token_ids, positions, slots, context_lens, tables = (
            self._there[start : start + size]
            for start, size in zip(self._starts, sizes, strict=True)
        )
        slots.fill_(_NOWHERE)
        self.tokens = Tokens(token_ids, positions, slots)
        places = torch.arange(num_rows, dtype=torch.int32, device=device)
        self.attended = DecodeRows(places, context_lens, tables.view(num_rows, self._width))

    def load(self, batch: Batch) -> None:
        """Take on a batch of decode rows, its tensors on the host, in one copy to the device."""
        num_rows, width = batch.block_tables.shape
        assert num_rows <= self.num_rows and batch.context_lens.max() <= self.most_tokens
        assert (batch.query_lens == 1).all(), "a chunk is not a decode row"
        *starts, tables_start = self._starts
        length = tables_start + num_rows * self._width
        packed = staged(length, self._there.device, torch.int32)
        numbers = packed.numpy()
        rows = batch.token_ids, batch.positions, batch.slot_mapping
        values = (*(tensor.numpy() for tensor in rows), batch.context_lens)
        for start, value, pad in zip(starts, values, (0, 0, _NOWHERE, 0), strict=True):
            numbers[start : start + num_rows] = value
            numbers[start + num_rows : start + self.num_rows] = pad
        # Places behind a row's own blocks are read by nobody, and rows that pad have no blocks.
        numbers[tables_start:].reshape(num_rows, self._width)[:, :width] = batch.block_tables
        self._there[:length].copy_(packed, non_blocking=True)
