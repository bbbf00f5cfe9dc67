"""The paged KV cache in the memory of a GPU, and its bytes on the host.

Bytes go through memory of the host that is pinned, on a stream beside the model's:

    read    cache ──gather──► one tensor ──copy──► pinned memory, which is what is returned
    write   data ──► pinned memory ──copy──► one tensor ──scatter──► cache

Both return when that is done. `read` first waits for everything that was launched for the model.
`write` does not: it runs on another thread while the model computes, and must not wait for a step.
It needs not, because a block is granted to a transfer between steps only, when the work of the last
one has ended (ModelRunner.step); but blocks may still be being copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from splitserve.config import KVLayout
from splitserve.engine.batch import Ints
from splitserve.engine.kv_cache import PagedKV, Region
from splitserve.engine.packing import staged, to_device
from splitserve.engine.triton_kernels.kv_copy import gather_kv, scatter_kv


class GpuKVCache(PagedKV):
    """Owns a stream for transfers beside the blocks. On a device without streams it does without.

    The thread that makes it is the model's; its current stream is the one that is waited for.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        super().__init__(layout, num_blocks, device)
        self._device = device
        self._side = self._model = None
        if device.type == "cuda":
            self._model = torch.cuda.current_stream(device)
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def read(self, block_ids: Sequence[int], region: Region) -> memoryview:
        self._check(block_ids, region)
        if self._side is not None and self._model is not None:
            self._side.wait_stream(self._model)
        return self._gathered(self._view(region), self._slots(block_ids, region))

    def write(self, block_ids: Sequence[int], region: Region, data: memoryview) -> None:
        self._check(block_ids, region, data)
        if self._side is not None:
            self._side.wait_event(self._copied)
        self._scatter(self._view(region), self._slots(block_ids, region), data)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        super().copy_blocks(pairs)
        if self._model is not None:
            self._copied.record(self._model)

    def warm_up(self) -> None:
        """Compile both kernels."""
        slots = np.arange(self.layout.block_size)
        self._scatter(self.tensor, slots, self._gathered(self.tensor, slots))

    def _gathered(self, kv: Tensor, slots: Ints) -> memoryview:
        shape = (len(kv), 2, len(slots), *kv.shape[4:])
        with self._beside():
            staging = torch.empty(shape, dtype=kv.dtype, device=self._device)
            gather_kv(kv, to_device([slots], self._device)[0], staging)
            host = staged(staging.nbytes, self._device, torch.uint8)
            host.copy_(staging.view(torch.uint8).view(-1), non_blocking=True)
        return host.numpy().data

    def _scatter(self, kv: Tensor, slots: Ints, data: memoryview) -> None:
        shape = (len(kv), 2, len(slots), *kv.shape[4:])
        with self._beside():
            host = staged(data.nbytes, self._device, torch.uint8)
            host.numpy()[:] = np.frombuffer(data, np.uint8)
            staging = host.to(self._device, non_blocking=True).view(kv.dtype).view(shape)
            scatter_kv(kv, to_device([slots], self._device)[0], staging)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """What the block launches is launched beside the model's work, and done at its end."""
        if self._side is None:
            yield
            return
        try:
            with torch.cuda.stream(self._side):
                yield
        finally:
            self._side.synchronize()

    def _view(self, region: Region) -> Tensor:
        layers = slice(region.layer_start, region.layer_end)
        heads = slice(region.head_start, region.head_end)
        return self.tensor[layers, :, :, :, heads]

    def _slots(self, block_ids: Sequence[int], region: Region) -> Ints:
        """Where the region's tokens are, [num_tokens]: block_id * block_size + place."""
        size = self.layout.block_size
        tokens = np.arange(region.token_start, region.token_end)
        first = region.token_start // size
        ids = np.asarray(block_ids[first : -(-region.token_end // size)], np.int64)
        slots: Ints = ids[tokens // size - first] * size + tokens % size
        return slots
