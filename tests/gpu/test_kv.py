"""KV written, gathered and scattered on the GPU, and sent to the host beside other work."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from splitserve.engine.attention import base
from splitserve.engine.triton_kernels.kv_copy import gather_kv, scatter_kv
from splitserve.engine.triton_kernels.write_kv import write_kv

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# Layers, tokens, first head and last head of a transfer.
BOXES = ((0, 4, 1, 0, 8), (0, 4, 1000, 0, 8), (1, 2, 333, 2, 6), (3, 4, 16, 7, 8))
Box = tuple[int, int, int, int, int]


def cache_of(dtype: torch.dtype, seed: int = 0, head_dim: int = 80) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 2, 80, 16, 8, head_dim, generator=generator).to(dtype).cuda()


def view_of(kv: Tensor, box: Box) -> tuple[Tensor, Tensor]:
    """The layers and heads of a box, and the slots of its tokens."""
    first_layer, last_layer, num_tokens, first_head, last_head = box
    slots = torch.randperm(80 * 16, generator=torch.Generator().manual_seed(5))[:num_tokens]
    return kv[first_layer:last_layer, :, :, :, first_head:last_head], slots.cuda()


@DTYPES
@pytest.mark.parametrize("box", BOXES, ids=str)
def test_gather_and_scatter(box: Box, dtype: torch.dtype) -> None:
    kv, target = cache_of(dtype), cache_of(dtype, seed=1)
    source, slots = view_of(kv, box)
    expected = source.flatten(2, 3)[:, :, slots]
    staging = torch.full_like(expected, torch.nan)
    gather_kv(source, slots, staging)
    assert torch.equal(staging, expected)

    expected_target = target.clone()
    view_of(expected_target, box)[0].flatten(2, 3)[:, :, slots] = staging
    scatter_kv(view_of(target, box)[0], slots, staging)
    assert torch.equal(target, expected_target)


@DTYPES
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_new_tokens_are_written_in_their_places(head_dim: int, dtype: torch.dtype) -> None:
    found, expected = cache_of(dtype, 0, head_dim)[1], cache_of(dtype, 0, head_dim)[1]
    wide = torch.randn(300, 20, head_dim, device="cuda").to(dtype)
    key, value = wide[:, 4:12], wide[:, 12:]
    slots = torch.randperm(80 * 16, device="cuda")[:300]
    write_kv(found, slots, key, value)
    base.write_kv(expected, slots, key, value)
    assert torch.equal(found, expected)


def test_tokens_that_pad_a_batch_are_not_written() -> None:
    found, expected = cache_of(torch.bfloat16)[0], cache_of(torch.bfloat16)[0]
    key = torch.ones(3, 8, 80, dtype=torch.bfloat16, device="cuda")
    write_kv(found, torch.tensor([-1, 3, -1], device="cuda"), key, key)
    expected.flatten(1, 2)[:, 3] = 1
    assert torch.equal(found, expected)


def test_a_gather_on_a_side_stream_arrives_on_the_host() -> None:
    kv = cache_of(torch.bfloat16)
    source, slots = view_of(kv, (0, 4, 1000, 0, 8))
    staging = torch.empty(4, 2, 1000, 8, 80, dtype=torch.bfloat16, device="cuda")
    host = torch.empty(staging.shape, dtype=staging.dtype, pin_memory=True)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gather_kv(source, slots, staging)
        host.copy_(staging, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(side)
    done.synchronize()
    assert torch.equal(host, source.flatten(2, 3)[:, :, slots].cpu())
