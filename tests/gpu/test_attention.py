"""Paged attention on the GPU against plain torch there, in each dtype."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from splitserve.engine.attention import make_attention
from splitserve.engine.attention.triton_backend import TritonAttention
from splitserve.engine.batch import Batch
from splitserve.engine.gpu.rows import PaddedRows
from tests.kernels.cases import Case, Spans, reference

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# GQA ratio, KV heads, head_dim. Each takes some seconds to compile.
SHAPES = ((1, 4, 64), (3, 3, 64), (4, 8, 128), (8, 2, 80), (5, 2, 96), (7, 1, 256), (2, 2, 16))
SHAPES_AND_DTYPES = [(shape, torch.bfloat16) for shape in SHAPES]
SHAPES_AND_DTYPES += [(shape, torch.float16) for shape in SHAPES[2:4]]
SHAPES_AND_DTYPES += [(shape, torch.float32) for shape in SHAPES[1:4]]
MIXES: dict[str, Spans] = {
    "decode": ((0, 1), (15, 16), (16, 17), (127, 128), (128, 129), (999, 1000), (8192, 8193)),
    "prefill": ((0, 2), (0, 64), (0, 700), (16, 48), (500, 1029), (3000, 3001 + 128)),
    "mixed": ((0, 300), (299, 300), (8, 9), (7, 9), (640, 1000), (5000, 5001)),
    "long": ((20_000, 20_001), (12_000, 12_100), (0, 1)),
}
# A weight is rounded to the dtype before it meets its value; all else is f32 until the end.
TOLERANCE = {
    torch.float32: (1e-4, 1e-5),
    torch.bfloat16: (2**-7, 2**-8),
    torch.float16: (2**-10, 2**-10),
}


def check(case: Case) -> None:
    batch = case.batch()
    query, layer_kv = case.query(batch), case.layer_kv(batch)
    found, expected = attend(case, batch, query, layer_kv), reference(case, batch, query, layer_kv)
    rtol, atol = TOLERANCE[case.dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=rtol, atol=atol)


def attend(case: Case, batch: Batch, query: Tensor, layer_kv: Tensor) -> Tensor:
    backend = make_attention("triton", case.shape, case.dtype)
    with torch.inference_mode():
        return backend.plan(batch).attend(query, layer_kv)


@pytest.mark.parametrize(("shape", "dtype"), SHAPES_AND_DTYPES, ids=str)
@pytest.mark.parametrize("mix", MIXES)
def test_equals_reference(mix: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(Case(*shape, dtype, MIXES[mix], device="cuda"))


@pytest.mark.parametrize("block_size", [1, 5, 32, 100])
def test_any_block_size(block_size: int) -> None:
    check(Case(3, 3, 64, torch.bfloat16, MIXES["mixed"], block_size, device="cuda"))


@DTYPES
@pytest.mark.parametrize("span", [(1000, 1001), (30, 400)], ids=["decode", "prefill"])
def test_a_sequence_does_not_depend_on_its_batch_mates(
    span: tuple[int, int], dtype: torch.dtype
) -> None:
    """Bit for bit: alone, among equals, beside a much longer row, beside chunks."""
    results = []
    num_tokens = span[1] - span[0]
    batch_mates: tuple[Spans, ...] = ((), (span,) * 31, ((20_000, 20_001),), ((0, 333), (3, 9)))
    for others in batch_mates:
        case = Case(3, 3, 64, dtype, (span, *others), device="cuda")
        batch = case.batch()
        query = torch.randn(len(batch.positions), 9, 64, device="cuda").to(dtype)
        query[:num_tokens] = torch.linspace(-2, 2, num_tokens * 9 * 64).view(-1, 9, 64)
        results.append(attend(case, batch, query, case.layer_kv(batch))[:num_tokens])
    assert all(torch.equal(result, results[0]) for result in results)


def test_what_is_not_a_number_stays_in_its_row() -> None:
    case = Case(3, 3, 64, torch.bfloat16, ((140, 141), (20, 21), (0, 40)), device="cuda")
    batch = case.batch()
    query, layer_kv = case.query(batch), case.layer_kv(batch)
    healthy = attend(case, batch, query, layer_kv)
    query[[1, 20]] = torch.nan
    found = attend(case, batch, query, layer_kv)
    sick = torch.zeros(len(query), dtype=torch.bool, device="cuda")
    sick[[1, 20]] = True
    assert found[sick].isnan().all() and torch.equal(found[~sick], healthy[~sick])


@DTYPES
def test_a_captured_graph_serves_one_batch_after_another(dtype: torch.dtype) -> None:
    num_rows, most_tokens = 8, 9000
    first = Case(4, 2, 128, dtype, (), device="cuda")
    backend = make_attention("triton", first.shape, dtype)
    assert isinstance(backend, TritonAttention)
    padded = PaddedRows(num_rows, most_tokens, first.block_size, torch.device("cuda"))
    plan = backend.decode_plan(padded.attended, most_tokens)
    query = torch.zeros(num_rows, 8, 128, dtype=dtype, device="cuda")
    layer_kv = torch.zeros(2, 2000, 16, 2, 128, dtype=dtype, device="cuda")
    plan.attend(query, layer_kv)  # compiles, which a capture does not allow
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = plan.attend(query, layer_kv)

    mixes: tuple[Spans, ...] = (((8998, 8999), (0, 1), (128, 129)), ((40, 41),) * num_rows)
    for spans in (*mixes, ((700, 701),)):
        case = Case(4, 2, 128, dtype, spans, device="cuda")
        batch = case.batch()
        rows, kv = case.query(batch), case.layer_kv(batch)
        padded.load(replace(case, device="cpu").batch())
        query[: len(spans)] = rows
        layer_kv[:, : kv.shape[1]] = kv
        graph.replay()
        assert torch.equal(output[: len(spans)], attend(case, batch, rows, kv))
        assert (output[len(spans) :] == 0).all()
