"""Every kernel, as its launcher launches it, becomes code for each GPU."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch
import triton

from splitserve.engine import triton_kernels
from splitserve.engine.attention.triton_backend import TritonAttention
from splitserve.engine.triton_kernels.kv_copy import gather_kv, scatter_kv
from splitserve.engine.triton_kernels.rms_norm import add_rms_norm, rms_norm
from splitserve.engine.triton_kernels.rope import rotate
from splitserve.engine.triton_kernels.silu_and_mul import silu_and_mul
from splitserve.engine.triton_kernels.write_kv import write_kv
from tests.kernels.cases import Case
from tests.kernels.compiled.launches import Launch, record

# Shared memory that a program can have, bytes (CUDA C++ Programming Guide, compute capabilities).
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
HEAD_DIMS = (64, 80, 128)
HIDDEN_SIZE = 576
ALL = [(torch.bfloat16, size, capability) for size in HEAD_DIMS for capability in SHARED_BYTES]
# f32 is there to compare numbers; its products, without tensor cores, are slow to compile.
ALL += [(torch.float32, 80, 80), (torch.float16, 64, 90)]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    return record(monkeypatch)


def launch_everything(head_dim: int, dtype: torch.dtype) -> None:
    case = Case(4, 2, head_dim, dtype, ((0, 300), (299, 300)))
    batch, shape = case.batch(), case.shape
    num_tokens, layer_kv = len(batch.positions), case.layer_kv(batch)
    heads = torch.zeros(num_tokens, shape.num_heads + 4, head_dim, dtype=dtype)
    query, key, value = heads[:, :-4], heads[:, -4:-2], heads[:, -2:]
    TritonAttention(shape, dtype).plan(batch).attend(query, layer_kv)
    write_kv(layer_kv, batch.slot_mapping, key, value)
    rms_norm(heads[:, :-2], torch.zeros(shape.num_heads + 2, head_dim), 1e-5)
    rotate(heads[:, :-2], (torch.zeros(num_tokens, 1, head_dim),) * 2)

    hidden = torch.zeros(num_tokens, HIDDEN_SIZE, dtype=dtype)
    add_rms_norm(hidden, hidden.clone(), torch.zeros(HIDDEN_SIZE), 1e-5)
    silu_and_mul(torch.zeros(num_tokens, 2 * HIDDEN_SIZE, dtype=dtype))
    staging = torch.zeros(1, 2, num_tokens, 2, head_dim, dtype=dtype)
    gather_kv(layer_kv[None], batch.slot_mapping, staging)
    scatter_kv(layer_kv[None], batch.slot_mapping, staging)


def kernel_names() -> set[str]:
    """Kernels there are: what is launched, and not called by another, is named with a _."""
    names = set()
    for module in pkgutil.iter_modules(triton_kernels.__path__, f"{triton_kernels.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, triton.JITFunction) and name.startswith("_"):
                names.add(name)
    return names


@pytest.mark.parametrize(("dtype", "head_dim", "capability"), ALL, ids=str)
def test_every_kernel_compiles(
    launches: list[Launch], dtype: torch.dtype, head_dim: int, capability: int
) -> None:
    launch_everything(head_dim, dtype)
    assert {launch.name for launch in launches} == kernel_names()
    for launch in launches:
        compiled = launch.compile(capability)
        assert f".target sm_{capability}" in compiled.asm["ptx"], launch.name
        assert compiled.asm["cubin"].startswith(b"\x7fELF"), launch.name
        assert compiled.metadata.shared <= SHARED_BYTES[capability], launch.name


def test_other_batches_need_no_other_code(launches: list[Launch]) -> None:
    """What is compiled before `ready` serves every batch: sizes of a batch are not specialized."""
    # One token and many; block tables and parts of every width, 1 and multiples of 16 among them.
    for spans in (((0, 1),), ((8, 9), (0, 17)), ((299, 300), (0, 256)), ((4095, 4096),) * 16):
        case = Case(4, 2, 64, torch.bfloat16, spans)
        batch = case.batch()
        layer_kv, query = case.layer_kv(batch), case.query(batch)
        TritonAttention(case.shape, case.dtype).plan(batch).attend(query, layer_kv)
        write_kv(layer_kv, batch.slot_mapping, query[:, :2], query[:, 2:4])
        staging = torch.zeros(1, 2, len(query), 2, 64, dtype=case.dtype)
        gather_kv(layer_kv[None], batch.slot_mapping, staging)
    assert {launch.name for launch in launches} == {
        *("_prefill", "_decode_parts", "_merge_parts", "_write_kv", "_copy_kv")
    }
    assert len({launch.specialization for launch in launches}) == 5
