"""The pieces a decoder is made of. Plain objects over tensors: nothing here is trained."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

# oneDNN lays a weight out for about this many rows; a decode batch is what it is best for.
_TYPICAL_ROWS = 16
# Below this many rows f32 kernels sum in another order (bf16's don't): pad, so that a row does
# not depend on its batch-mates.
_LEAST_F32_ROWS_PACKED, _LEAST_F32_ROWS = 4, 16


class Linear:
    """x [rows, in] → [rows, out], with `weight` [out, in] laid out once for this CPU.

    Where oneDNN can pre-pack, it is 1.1 to 3 times faster than torch's own linear at decode's
    row counts; elsewhere this is torch's own linear.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = can_prepack(weight)
        self._bias = bias
        self._weight = weight
        self._least_rows = 1
        if weight.dtype == torch.float32 and weight.device.type == "cpu":
            self._least_rows = _LEAST_F32_ROWS_PACKED if self._packed else _LEAST_F32_ROWS
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        missing = self._least_rows - len(x)
        if missing <= 0:
            return self._apply(x)
        return self._apply(F.pad(x, (0, 0, 0, missing)))[: len(x)]

    def _apply(self, x: Tensor) -> Tensor:
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        result = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return cast(Tensor, result)


def can_prepack(weight: Tensor) -> bool:
    """Whether this build of torch and this CPU have oneDNN's pre-packed linear for a weight."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class RMSNorm:
    """x / rms(x) * weight over the last axis, in f32 and rounded once (Zhang, Sennrich 2019)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight.float()
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        exact = x.float()
        norm = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(self._eps).rsqrt_()
        normed: Tensor = (exact * scale).mul_(self._weight)
        return normed.to(x.dtype)


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up as one matrix (Shazeer, "GLU Variants", 2020)."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, -1)
        return self._down(F.silu(gate) * up)
