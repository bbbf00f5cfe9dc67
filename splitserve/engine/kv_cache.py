"""The paged KV cache of one worker: one tensor, and byte access to it for transfers.

This one is in the memory of the CPU; that of a GPU is in gpu/kv_cache.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitserve.config import KVLayout
from splitserve.engine.pages import zeros
from splitserve.errors import ConfigError

Bytes = npt.NDArray[np.uint8]
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}


class Region(Protocol):
    """A box of a request's KV; half-open ranges, tokens numbered within the request."""

    @property
    def layer_start(self) -> int: ...
    @property
    def layer_end(self) -> int: ...
    @property
    def token_start(self) -> int: ...
    @property
    def token_end(self) -> int: ...
    @property
    def head_start(self) -> int: ...
    @property
    def head_end(self) -> int: ...


class PagedKV(ABC):
    """Owns the keys and values of every block.

    `tensor` is [num_layers, 2 (K, V), num_blocks, block_size, num_kv_heads, head_dim]; in int8 the
    last axis holds a head's numbers and the four bytes of their scale.

    `read` and `write` may run on another thread than the model as long as they touch other
    blocks.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        assert num_blocks > 0, num_blocks
        self.layout = layout
        self.num_blocks = num_blocks
        # Zeros, not empty memory: masked places are multiplied by 0, and 0 * NaN is NaN.
        numbers = layout.head_bytes // layout.bytes_per_number
        heads = layout.block_size, layout.num_kv_heads, numbers
        shape, dtype = (layout.num_layers, 2, num_blocks, *heads), DTYPES[layout.dtype]
        try:
            if device.type == "cpu":
                self.tensor: Tensor = zeros(shape, dtype)
            else:
                self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # of the allocator
            gib = num_blocks * layout.block_size * layout.token_bytes / 2**30
            raise ConfigError(
                f"no memory for num_blocks {num_blocks}: their KV takes {gib:.1f} GiB"
            ) from error

    @abstractmethod
    def read(self, block_ids: Sequence[int], region: Region) -> memoryview:
        """A copy of the region: C-contiguous bytes [layers, 2, tokens, heads, head_bytes].

        Raises ValueError for a region outside the layout or the blocks.
        """

    @abstractmethod
    def write(self, block_ids: Sequence[int], region: Region, data: memoryview) -> None:
        """Write such bytes into the region.

        Raises ValueError when the size is not the region's, or for a region outside the layout
        or the blocks; then nothing was written.
        """

    @abstractmethod
    def warm_up(self) -> None:
        """Do what would delay the first `read` and `write`. The first block may be written."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), all layers. Every source is read before any write."""
        if not pairs:
            return
        sources, targets = torch.tensor(pairs, dtype=torch.int64).to(self.tensor.device).unbind(1)
        self.tensor.index_copy_(2, targets, self.tensor.index_select(2, sources))

    def _shape(self, region: Region) -> tuple[int, ...]:
        layout = self.layout
        return (
            region.layer_end - region.layer_start,
            2,
            region.token_end - region.token_start,
            region.head_end - region.head_start,
            layout.head_bytes,
        )

    def _check(
        self, block_ids: Sequence[int], region: Region, data: memoryview | None = None
    ) -> None:
        """`data` is what is to be written there."""
        layout = self.layout
        num_tokens = len(block_ids) * layout.block_size
        _check_range("layers", region.layer_start, region.layer_end, layout.num_layers)
        _check_range("tokens", region.token_start, region.token_end, num_tokens)
        _check_range("heads", region.head_start, region.head_end, layout.num_kv_heads)
        first, last = (
            region.token_start // layout.block_size,
            -(-region.token_end // layout.block_size),
        )
        used = block_ids[first:last]
        if min(used) < 0 or max(used) >= self.num_blocks:
            raise ValueError(f"block ids {min(used)} to {max(used)} of {self.num_blocks} blocks")
        size = math.prod(self._shape(region))
        if data is not None and data.nbytes != size:
            raise ValueError(f"{data.nbytes} bytes for a region of {size}")


class KVCache(PagedKV):
    """The cache in memory of the CPU.

    It copies with numpy, which holds no lock of the interpreter meanwhile and starts no threads:
    torch would wake its thread pool and fight the forward pass for the cores.
    """

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        super().__init__(layout, num_blocks, torch.device("cpu"))
        # [layers, 2, tokens, heads, bytes]: blocks with neighbouring ids are neighbouring tokens.
        self._bytes: Bytes = (
            self.tensor.view(torch.uint8)
            .numpy()
            .reshape(layout.num_layers, 2, num_blocks * layout.block_size, layout.num_kv_heads, -1)
        )

    def warm_up(self) -> None:
        """There is nothing."""

    def read(self, block_ids: Sequence[int], region: Region) -> memoryview:
        self._check(block_ids, region)
        target: Bytes = np.empty(self._shape(region), np.uint8)
        for source, first, last in self._runs(block_ids, region):
            target[:, :, first:last] = source
        return target.reshape(-1).data

    def write(self, block_ids: Sequence[int], region: Region, data: memoryview) -> None:
        self._check(block_ids, region, data)
        source: Bytes = np.frombuffer(data, np.uint8).reshape(self._shape(region))
        for target, first, last in self._runs(block_ids, region):
            target[...] = source[:, :, first:last]

    def _runs(
        self, block_ids: Sequence[int], region: Region
    ) -> Iterator[tuple[npt.NDArray[Any], int, int]]:
        """The region's bytes, one view for each run of blocks with neighbouring ids, and which of
        the region's tokens (from 0) it holds."""
        box = self._bytes[
            region.layer_start : region.layer_end, :, :, region.head_start : region.head_end
        ]
        size = self.layout.block_size
        start, end = region.token_start, region.token_end
        first_block, last_block = start // size, -(-end // size)
        ids = np.asarray(block_ids[first_block:last_block], np.int64)
        breaks = np.flatnonzero(np.diff(ids) != 1) + 1
        for low, high in zip((0, *breaks.tolist()), (*breaks.tolist(), len(ids)), strict=True):
            first = max((first_block + low) * size, start)
            last = min((first_block + high) * size, end)
            place = int(ids[low]) * size + first - (first_block + low) * size
            yield box[:, :, place : place + last - first], first - start, last - start


def _check_range(what: str, start: int, end: int, limit: int) -> None:
    if not 0 <= start < end <= limit:
        raise ValueError(f"{what} [{start}, {end}) are not in [0, {limit})")
