from __future__ import annotations

import numpy as np
import pytest
import torch

from splitserve.engine.batch import build_batch
from splitserve.engine.packing import borders, to_device
from tests.unit.engine.sequences import chunk

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_arrays_become_aligned_parts_of_one_tensor(dtype: torch.dtype) -> None:
    arrays = [np.arange(5), np.empty((0, 4), np.int64), np.arange(6).reshape(2, 3), np.array([7])]
    found = to_device(arrays, CPU, dtype)
    for tensor, array in zip(found, arrays, strict=True):
        assert tensor.dtype == dtype and tensor.data_ptr() % 16 == 0
        assert tensor.tolist() == array.tolist()
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1


def test_parts_start_at_borders() -> None:
    assert borders((1, 4, 5, 0, 2), torch.int32) == ([0, 4, 8, 16, 16], 20)
    assert borders((1, 4), torch.int64) == ([0, 2], 6)


def test_a_batch_that_is_there_stays_itself() -> None:
    batch = build_batch([chunk([1, 2, 3], 0, 3, [4])], block_size=16)
    assert batch.to(CPU) is batch
    meta = torch.device("meta")
    there = batch.to(meta)
    assert there.positions.device == there.token_ids.device == meta
    assert there.query_starts is batch.query_starts and there.sample_rows is None
