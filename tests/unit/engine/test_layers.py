from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from splitserve.engine.models import layers
from splitserve.engine.models.layers import Linear, RMSNorm

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=[True, False], ids=["packed", "plain"])
def packing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With oneDNN's packed weights where this machine has them, and as on machines without."""
    if not request.param:
        monkeypatch.setattr(layers, "can_prepack", lambda weight: False)
    return bool(request.param)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.usefixtures("packing")
def test_linear_is_a_matrix_product(dtype: torch.dtype, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 32, generator=generator).to(dtype)
    offset = torch.randn(48, generator=generator).to(dtype) if bias else None
    x = torch.randn(5, 32, generator=generator).to(dtype)
    exact = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    with torch.inference_mode():
        found = Linear(weight, offset)(x)
    assert found.dtype == dtype and found.shape == (5, 48)
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("packing")
def test_a_row_does_not_depend_on_the_number_of_rows(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = Linear(torch.randn(96, 1536, generator=generator).to(dtype))
    x = torch.randn(64, 1536, generator=generator).to(dtype)
    with torch.inference_mode():
        alone = linear(x[:1])
        for num_rows in range(2, 65):
            assert torch.equal(linear(x[:num_rows])[:1], alone), num_rows
        assert linear(x[:0]).shape == (0, 96)


def test_this_build_packs_what_it_says() -> None:
    """If torch drops the operators, this engine still runs; this test says it got slower."""
    assert layers.can_prepack(torch.zeros(2, 2))
    assert not layers.can_prepack(torch.zeros(2, 2, dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm(dtype: torch.dtype) -> None:
    x, weight = torch.randn(7, 24).to(dtype), torch.randn(24).to(dtype)
    expected = F.rms_norm(x.double(), (24,), weight.double(), 1e-5)
    before = x.clone()
    found = RMSNorm(weight, 1e-5)(x)
    assert found.dtype == dtype and torch.equal(x, before)
    tolerance = 1e-6 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
