"""Norm, rope and activation on the GPU against the decoder's layers in plain torch there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from splitserve.engine.models.layers import RMSNorm
from splitserve.engine.triton_kernels.rms_norm import add_rms_norm, rms_norm
from splitserve.engine.triton_kernels.rope import rotate
from splitserve.engine.triton_kernels.silu_and_mul import silu_and_mul

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SIZES = pytest.mark.parametrize("size", [64, 576, 1000, 8192])
EPS = 1e-5


def randn(*size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Both compute in f32 and round once."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[found.dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=rtol, atol=1e-5)


@DTYPES
@SIZES
def test_norm(size: int, dtype: torch.dtype) -> None:
    x, weight = randn(333, size + 8, dtype=dtype)[:, :size], randn(size, dtype=torch.float32)
    assert_near(rms_norm(x, weight, EPS), RMSNorm(weight, EPS)(x))


@DTYPES
def test_norm_by_heads(dtype: torch.dtype) -> None:
    x, weight = randn(333, 40, 80, dtype=dtype)[:, 3:39], randn(36, 80, dtype=torch.float32)
    assert_near(rms_norm(x, weight, EPS), RMSNorm(weight, EPS)(x))


@DTYPES
@SIZES
def test_norm_after_the_residual(size: int, dtype: torch.dtype) -> None:
    x, residual = (randn(333, size, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = randn(size, dtype=torch.float32, seed=2)
    normed, summed = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(summed, x + residual)
    assert_near(normed, RMSNorm(weight, EPS)(x + residual))


@DTYPES
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_rope(head_dim: int, dtype: torch.dtype) -> None:
    """As Rope.rotate, whose tables are made here: they come from a model's config otherwise."""
    angles = torch.rand(333, 1, head_dim // 2, device="cuda") * 6
    cosine, sine = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
    heads = randn(333, 41, head_dim, dtype=dtype)[:, 3:40]
    exact = heads.float()
    expected = (exact * cosine + exact.roll(head_dim // 2, -1) * sine).to(dtype)
    assert_near(rotate(heads, (cosine, sine)), expected)


@DTYPES
@SIZES
def test_activation(size: int, dtype: torch.dtype) -> None:
    gate_up = randn(333, 2 * size, dtype=dtype) * 8
    gate, up = gate_up.float().chunk(2, -1)
    assert_near(silu_and_mul(gate_up), (F.silu(gate) * up).to(dtype))
