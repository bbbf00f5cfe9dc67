"""Memory in large pages, for what a step reads from end to end.

Looking up where a page of 4 KiB lies takes as long as reading a good part of it: with pages of
2 MiB a core reads up to 1.5 times as fast. Where there are none, these are plain pages.

The system finds a page, and clears it, when it is first written to: a millisecond or two each. What
is written during steps should have its pages before.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64  # of a cache line


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros, all pages there. Raises RuntimeError, as torch does, without memory.

    Clearing a GiB takes 0.05 s, or a few seconds when a virtual machine has to ask its host for it.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = _mapped(num_bytes)
    memory[:: mmap.PAGESIZE].zero_()
    return memory[:num_bytes].view(dtype).view(*shape)


class PagePool:
    """Hands out parts of large chunks, for many tensors that live and end together."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor, aligned to 64 bytes, that keeps its chunk alive."""
        num_bytes = numel * dtype.itemsize
        if self._used + num_bytes > len(self._chunk):
            self._chunk = _mapped(max(num_bytes, _CHUNK_BYTES))
            self._used = 0
        taken = self._chunk[self._used : self._used + num_bytes].view(dtype)
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return taken


def _mapped(num_bytes: int) -> Tensor:
    """At least so many bytes, [num_bytes] or 1 of them, uint8. They are zero when first read."""
    try:
        memory = mmap.mmap(-1, max(num_bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise RuntimeError(f"no {num_bytes} bytes of memory: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
