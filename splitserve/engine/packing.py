"""Numbers of a batch to a device: many arrays in one copy, which the host need not wait for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_BORDER_BYTES = 16  # Triton kernels are compiled anew for pointers that are not on such a border


def to_device(
    arrays: Sequence[npt.NDArray[np.int64]], device: torch.device, dtype: torch.dtype = torch.int32
) -> list[Tensor]:
    """Each array on the device, all of them parts of one tensor of `dtype`."""
    starts, length = borders([array.size for array in arrays], dtype)
    packed = staged(length, device, dtype)
    numbers = packed.numpy()
    for start, array in zip(starts, arrays, strict=True):
        numbers[start : start + array.size] = array.reshape(-1)
    there = packed.to(device, non_blocking=True)
    return [
        there[start : start + array.size].view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def borders(sizes: Iterable[int], dtype: torch.dtype) -> tuple[list[int], int]:
    """Where each of some parts of one tensor starts, and how long that one is."""
    step = _BORDER_BYTES // dtype.itemsize
    starts, length = [], 0
    for size in sizes:
        starts.append(length)
        length += -(-size // step) * step
    return starts, length


def staged(length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Memory on the host that a copy to or from the device need not wait for."""
    return torch.empty(length, dtype=dtype, pin_memory=device.type == "cuda")
