"""What launchers launch, written down instead of run, and compiled for a GPU that is not here."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_OPTIONS = ("num_warps", "num_stages")
_ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, its arguments by name, and how it is to be compiled."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]

    @property
    def name(self) -> str:
        name: str = self.kernel.fn.__name__
        return name

    @property
    def specialization(self) -> tuple[object, ...]:
        """What code is compiled for: launches with another one need other code."""
        kinds = []
        for parameter in self.kernel.params:
            value = self.arguments[parameter.name]
            kind = _kind(parameter, value)
            constant = value if kind == "constexpr" else _is_aligned(parameter, value)
            kinds.append((kind, constant))
        return (self.name, *kinds, *self.options.items())

    def compile(self, capability: int) -> Any:
        """For compute capability `capability` / 10, as triton would at this launch."""
        signature, constants, attributes = {}, {}, {}
        for place, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            signature[parameter.name] = kind = _kind(parameter, value)
            if kind == "constexpr":
                constants[parameter.name] = value
            elif _is_aligned(parameter, value):
                attributes[(place,)] = _ALIGNED
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, GPUTarget("cuda", capability, 32), options=self.options)


def record(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """From now on launches are appended to this list, and nothing runs."""
    launches: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        bound = inspect.signature(kernel.fn).bind(*args, **kwargs)
        launches.append(Launch(kernel, bound.arguments, options))

    monkeypatch.setattr(triton.JITFunction, "run", run)
    return launches


def _kind(parameter: Any, value: Any) -> str:
    if parameter.is_constexpr or (_may_specialize(parameter, value) and value == 1):
        return "constexpr"
    if isinstance(value, Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if value < 2**31 else "i64"


def _may_specialize(parameter: Any, value: Any) -> bool:
    return isinstance(value, int) and not parameter.do_not_specialize


def _is_aligned(parameter: Any, value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.data_ptr() % 16 == 0
    return _may_specialize(parameter, value) and value % 16 == 0
