"""A KVStore in a numpy array, for tests of transports: no model, no torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from splitserve.config import KVLayout
from splitserve.wire.messages import Region

LAYOUT = KVLayout("bfloat16", num_layers=5, num_kv_heads=3, head_dim=8, block_size=16)


class FakeStore:
    """Blocks [num_blocks, layers, 2, block_size, heads, head_dim]; a bfloat16 is kept as uint16."""

    def __init__(self, layout: KVLayout = LAYOUT, num_blocks: int = 64) -> None:
        self._layout = layout
        dtype = np.uint32 if layout.bytes_per_number == 4 else np.uint16
        self.blocks: npt.NDArray[Any] = np.zeros(
            (
                num_blocks,
                layout.num_layers,
                2,
                layout.block_size,
                layout.num_kv_heads,
                layout.head_dim,
            ),
            dtype,
        )

    @property
    def layout(self) -> KVLayout:
        return self._layout

    def fill(self, seed: int) -> None:
        """Random numbers everywhere."""
        numbers = np.random.default_rng(seed)
        self.blocks[:] = numbers.integers(1, 2**16, self.blocks.shape, dtype=self.blocks.dtype)

    def read(self, block_ids: Sequence[int], region: Region) -> memoryview:
        return memoryview(self.tokens(block_ids, region).tobytes())

    def write(self, block_ids: Sequence[int], region: Region, data: memoryview) -> None:
        shape = self.tokens(block_ids, region).shape
        numbers = np.frombuffer(data, self.blocks.dtype).reshape(shape)
        for i, token in enumerate(range(region.token_start, region.token_end)):
            block_id, place = self._place(block_ids, token)
            box = self.blocks[block_id, region.layer_start : region.layer_end, :, place]
            box[:, :, region.head_start : region.head_end] = numbers[:, :, i]

    def tokens(self, block_ids: Sequence[int], region: Region) -> npt.NDArray[Any]:
        """A copy of a region: [layers, 2, tokens, heads, head_dim]."""
        columns = []
        for token in range(region.token_start, region.token_end):
            block_id, place = self._place(block_ids, token)
            box = self.blocks[block_id, region.layer_start : region.layer_end, :, place]
            columns.append(box[:, :, region.head_start : region.head_end])
        return np.ascontiguousarray(np.stack(columns, axis=2))

    def _place(self, block_ids: Sequence[int], token: int) -> tuple[int, int]:
        index, place = divmod(token, self._layout.block_size)
        return block_ids[index], place


def whole(layout: KVLayout, num_tokens: int) -> Region:
    """The region of a whole prompt."""
    return Region(0, layout.num_layers, 0, num_tokens, 0, layout.num_kv_heads)


def blocks_for(num_tokens: int, rng: random.Random, num_blocks: int = 64) -> tuple[int, ...]:
    """Enough blocks for a prompt, in random order."""
    needed = -(-num_tokens // LAYOUT.block_size)
    return tuple(rng.sample(range(num_blocks), needed))


def random_region(rng: random.Random, num_tokens: int, layout: KVLayout = LAYOUT) -> Region:
    """A non-empty box inside a prompt's KV."""
    layers = sorted(rng.sample(range(layout.num_layers + 1), 2))
    tokens = sorted(rng.sample(range(num_tokens + 1), 2))
    heads = sorted(rng.sample(range(layout.num_kv_heads + 1), 2))
    return Region(*layers, *tokens, *heads)
