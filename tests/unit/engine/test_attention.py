"""The fast backend, with its kernel and without, against the plain one."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from splitserve.engine.attention import make_attention
from splitserve.engine.attention.base import AttentionBackend, AttentionShape, write_kv
from splitserve.engine.attention.cpu import CpuAttention
from splitserve.engine.attention.paged_decode import PagedDecodeKernel
from splitserve.engine.batch import Batch, Chunk, build_batch
from splitserve.errors import ConfigError
from tests.unit.engine.sequences import Prompts

NUM_BLOCKS = 800
FAST = pytest.mark.parametrize("fast", ["cpu", "cpu without kernel"])
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@dataclass(frozen=True)
class Case:
    shape: AttentionShape
    dtype: torch.dtype
    block_size: int
    spans: tuple[tuple[int, int], ...]  # (start, end) of each chunk


def layer(case: Case) -> Tensor:
    size = (2, NUM_BLOCKS, case.block_size, case.shape.num_kv_heads, case.shape.head_dim)
    return torch.randn(size, generator=torch.Generator().manual_seed(1)).to(case.dtype)


def batch_of(case: Case, prompts: Prompts) -> Batch:
    chunks = [Chunk(range(end), start, end, prompts.blocks(end)) for start, end in case.spans]
    return build_batch(chunks, case.block_size)


def queries(case: Case, batch: Batch) -> Tensor:
    size = (len(batch.positions), case.shape.num_heads, case.shape.head_dim)
    return torch.randn(size, generator=torch.Generator().manual_seed(2)).to(case.dtype)


def backend_of(name: str, case: Case) -> AttentionBackend:
    if name == "cpu without kernel":
        return CpuAttention(case.shape, case.dtype, None)
    return make_attention(name, case.shape, case.dtype)


def attend(name: str, case: Case, batch: Batch, query: Tensor) -> Tensor:
    backend = backend_of(name, case)
    with torch.inference_mode():
        return backend.plan(batch).attend(query, layer(case))


SMALL = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25)
WIDE = AttentionShape(num_heads=4, num_kv_heads=4, head_dim=32, scale=32**-0.5)
MIXES: list[tuple[tuple[int, int], ...]] = [
    ((40, 41),),
    ((0, 1),),
    ((0, 37),),
    ((63, 64), (64, 65), (65, 66), (0, 1), (299, 300)),
    ((0, 17), (0, 64), (16, 48), (30, 90), (5, 6), (100, 101)),
    ((9, 10), (0, 3), (3, 7), (11, 12), (0, 2)),
    ((2000, 2001), *(((20 + i), (21 + i)) for i in range(40))),  # one long row, many short ones
]


@pytest.mark.parametrize("spans", MIXES, ids=range(len(MIXES)))
@pytest.mark.parametrize("shape", [SMALL, WIDE], ids=["grouped", "ungrouped"])
@pytest.mark.parametrize("block_size", [16, 5, 100])
@FAST
def test_cpu_equals_reference(
    fast: str, shape: AttentionShape, block_size: int, spans: tuple[tuple[int, int], ...]
) -> None:
    case = Case(shape, torch.float32, block_size, spans)
    batch = batch_of(case, Prompts(NUM_BLOCKS, block_size))
    query = queries(case, batch)
    result, plain = (attend(name, case, batch, query) for name in (fast, "reference"))
    assert result.shape == (len(query), shape.num_heads * shape.head_dim)
    torch.testing.assert_close(result, plain, rtol=0, atol=2e-6)


@FAST
def test_bfloat16_is_near_reference(fast: str) -> None:
    case = Case(SMALL, torch.bfloat16, 16, MIXES[4])
    batch = batch_of(case, Prompts(NUM_BLOCKS))
    query = queries(case, batch)
    result, plain = (attend(name, case, batch, query) for name in (fast, "reference"))
    torch.testing.assert_close(result.float(), plain.float(), rtol=0, atol=0.02)


@needs_compiler
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 128, 256])
def test_the_kernel_equals_reference_for_every_shape(head_dim: int, group: int) -> None:
    """Within one rounding to bfloat16 of f32 attention over the same numbers."""
    shape = AttentionShape(2 * group, 2, head_dim, head_dim**-0.5)
    assert PagedDecodeKernel.load(shape, torch.bfloat16) is not None
    case = Case(shape, torch.bfloat16, 16, ((299, 300), (15, 16), (128, 129), (0, 1)))
    batch = batch_of(case, Prompts(NUM_BLOCKS))
    query = queries(case, batch) * 4  # scores far apart
    result, plain = (attend(name, case, batch, query) for name in ("cpu", "reference"))
    torch.testing.assert_close(result.float(), plain.float(), rtol=2**-7, atol=1e-5)


@needs_compiler
def test_shapes_that_the_kernel_has_no_code_for_go_without_it() -> None:
    shape = AttentionShape(4, 2, 24, 24**-0.5)
    assert PagedDecodeKernel.load(shape, torch.float32) is None
    case = Case(shape, torch.float32, 16, ((40, 41), (7, 8)))
    batch = batch_of(case, Prompts(NUM_BLOCKS))
    query = queries(case, batch)
    result, plain = (attend(name, case, batch, query) for name in ("cpu", "reference"))
    torch.testing.assert_close(result, plain, rtol=0, atol=2e-6)


@FAST
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_what_is_not_a_number_stays_in_its_row(fast: str, value: float) -> None:
    case = Case(SMALL, torch.float32, 16, ((300, 301), (20, 21), (140, 141)))
    batch = batch_of(case, Prompts(NUM_BLOCKS))
    query = queries(case, batch)
    healthy = attend(fast, case, batch, query)
    query[1] = value
    result = attend(fast, case, batch, query)
    assert result[1].isnan().any()
    assert torch.equal(result[[0, 2]], healthy[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [SMALL, WIDE], ids=["grouped", "ungrouped"])
@FAST
def test_a_decode_row_does_not_depend_on_its_batch_mates(
    fast: str, shape: AttentionShape, dtype: torch.dtype
) -> None:
    """Bit for bit: alone, among equals, beside a much longer row, beside prefill chunks."""
    query = torch.randn(1, shape.num_heads, shape.head_dim).to(dtype)
    results = []
    for others in ((), ((150, 151),) * 7, ((1500, 1501),), ((0, 64), (3, 9), (10, 11))):
        case = Case(shape, dtype, 16, ((130, 131), *others))
        batch = batch_of(case, Prompts(NUM_BLOCKS))  # the first row gets the same blocks each time
        rows = queries(case, batch)
        rows[0] = query[0]
        results.append(attend(fast, case, batch, rows)[0])
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("span", [(0, 200), (0, 30), (70, 101)], ids=str)
def test_a_prefill_chunk_does_not_depend_on_its_batch_mates(
    span: tuple[int, int], dtype: torch.dtype
) -> None:
    first = torch.randn(span[1] - span[0], SMALL.num_heads, SMALL.head_dim).to(dtype)
    results = []
    for others in ((), ((0, 256),), (span, span), ((0, 31), (80, 111)), ((40, 41), (0, 900))):
        case = Case(SMALL, dtype, 16, (span, *others))
        batch = batch_of(case, Prompts(NUM_BLOCKS))
        rows = queries(case, batch)
        rows[: len(first)] = first
        results.append(attend("cpu", case, batch, rows)[: len(first)])
    assert all(torch.equal(result, results[0]) for result in results)


@FAST
def test_what_lies_behind_a_sequence_does_not_matter(fast: str) -> None:
    """A stale block tail and other sequences' blocks may hold anything that is a number."""
    case = Case(SMALL, torch.float32, 16, ((20, 21), (0, 30)))
    batch = batch_of(case, Prompts(NUM_BLOCKS))
    query = queries(case, batch)
    backend = backend_of(fast, case)
    kv = layer(case)
    before = backend.plan(batch).attend(query, kv)
    seen = torch.zeros(NUM_BLOCKS * 16, dtype=torch.bool)
    for table, length in zip(batch.block_tables, batch.context_lens, strict=True):
        for token in range(length):
            seen[table[token // 16] * 16 + token % 16] = True
    kv.flatten(1, 2)[:, ~seen] = 1e4
    assert torch.equal(backend.plan(batch).attend(query, kv), before)


def test_writing_puts_tokens_in_their_places() -> None:
    kv = torch.zeros(2, 4, 2, 1, 3)
    key, value = torch.arange(6.0).view(2, 1, 3), torch.arange(6.0, 12.0).view(2, 1, 3)
    write_kv(kv, torch.tensor([7, 2]), key, value)
    assert torch.equal(kv[0, 3, 1], key[0]) and torch.equal(kv[0, 1, 0], key[1])
    assert torch.equal(kv[1, 3, 1], value[0]) and torch.equal(kv[1, 1, 0], value[1])
    assert kv.count_nonzero() == 11  # one of the numbers is 0


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'flash'.*cpu, reference"):
        make_attention("flash", SMALL, torch.float32)
