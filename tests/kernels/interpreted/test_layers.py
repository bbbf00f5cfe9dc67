"""Norm, rope and activation against the layers of the decoder."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from splitserve.engine.models.config import RopeConfig
from splitserve.engine.models.layers import RMSNorm
from splitserve.engine.models.rope import Rope
from splitserve.engine.triton_kernels.rms_norm import add_rms_norm, rms_norm
from splitserve.engine.triton_kernels.rope import rotate
from splitserve.engine.triton_kernels.silu_and_mul import silu_and_mul

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
EPS = 1e-5


def randn(*size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Both compute in f32 and round once (the interpreter cuts where others round bf16)."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[found.dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=rtol, atol=2e-6)


@DTYPES
@pytest.mark.parametrize("size", [64, 576, 1000])
def test_norm(size: int, dtype: torch.dtype) -> None:
    x, weight = randn(5, size + 7, dtype=dtype)[:, :size], randn(size, dtype=dtype, seed=1).float()
    assert_near(rms_norm(x, weight, EPS), RMSNorm(weight, EPS)(x))


@DTYPES
def test_norm_by_heads(dtype: torch.dtype) -> None:
    x, weight = randn(5, 7, 80, dtype=dtype)[:, 1:5], randn(4, 80, dtype=dtype, seed=1)
    assert_near(rms_norm(x, weight, EPS), RMSNorm(weight, EPS)(x))


@DTYPES
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_norm_after_the_residual(num_tokens: int, dtype: torch.dtype) -> None:
    x, residual = (randn(num_tokens, 576, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = randn(576, dtype=torch.float32, seed=2)
    before = x.clone(), residual.clone()
    normed, summed = add_rms_norm(x, residual, weight, EPS)
    assert_near(summed, x + residual)
    assert_near(normed, RMSNorm(weight, EPS)(summed))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@DTYPES
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("num_heads", [1, 12])
def test_rope(num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    rope = Rope(RopeConfig("default", 1e4, {}, None), head_dim, 300)
    angles = rope.at(torch.tensor([0, 299, 17, 18]))
    heads = randn(4, num_heads + 3, head_dim, dtype=dtype)[:, 2 : num_heads + 2]
    # Two products are added, which may be near each other's opposite.
    torch.testing.assert_close(
        rotate(heads, angles).float(),
        rope.rotate(heads, angles).float(),
        rtol={torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype],
        atol=1e-6,
    )


@DTYPES
@pytest.mark.parametrize("size", [96, 1536])
def test_activation(size: int, dtype: torch.dtype) -> None:
    gate_up = randn(3, 2 * size, dtype=dtype) * 4
    gate, up = gate_up.float().chunk(2, -1)
    assert_near(silu_and_mul(gate_up), (F.silu(gate) * up).to(dtype))
