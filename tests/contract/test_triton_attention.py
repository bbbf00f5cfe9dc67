"""The attention backend that has kernels only a GPU runs, interpreted here."""

from __future__ import annotations

import sys

import pytest
import torch

from splitserve.engine.attention import make_attention
from splitserve.engine.attention.base import AttentionShape
from splitserve.errors import ConfigError
from tests.kernels.children import needs_triton, run_interpreted

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)


@needs_triton
def test_it_is_a_backend_like_the_others() -> None:
    run_interpreted("test_backend.py")


def test_without_triton_it_is_refused_with_the_extras_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match=r"'triton'.*splitserve\[triton\]"):
        make_attention("triton", SHAPE, torch.float32)


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'triton'.*GPU"):
        make_attention("triton", SHAPE, torch.float32)
