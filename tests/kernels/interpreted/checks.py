"""The backend's answer for a case, and the comparison with plain torch's."""

from __future__ import annotations

import torch
from torch import Tensor

from splitserve.engine.attention.triton_backend import TritonAttention
from splitserve.engine.batch import Batch
from tests.kernels.cases import Case, reference


def check(case: Case) -> None:
    batch = case.batch()
    query, layer_kv = case.query(batch), case.layer_kv(batch)
    found, expected = attend(case, batch, query, layer_kv), reference(case, batch, query, layer_kv)
    assert found.shape == expected.shape and found.dtype == case.dtype
    # Interpreted, all is f32 until the end, where bf16 is cut instead of rounded.
    rtol, atol = (1e-5, 2e-6) if case.dtype == torch.float32 else (2**-7, 1e-5)
    torch.testing.assert_close(found.float(), expected.float(), rtol=rtol, atol=atol)


def attend(case: Case, batch: Batch, query: Tensor, layer_kv: Tensor) -> Tensor:
    with torch.inference_mode():
        return TritonAttention(case.shape, case.dtype).plan(batch).attend(query, layer_kv)
