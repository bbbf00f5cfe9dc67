"""What every attention backend keeps to, of the one by Triton kernels."""

from __future__ import annotations

import pytest
import torch

from splitserve.engine.attention import make_attention
from splitserve.engine.attention.triton_backend import TritonAttention
from splitserve.engine.gpu.rows import PaddedRows
from tests.kernels.cases import Case
from tests.kernels.interpreted.checks import attend, check

MIXED = ((0, 1), (40, 41), (0, 17), (127, 128), (16, 48), (5, 6), (128, 129))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decode_rows_among_chunks(dtype: torch.dtype) -> None:
    check(Case(3, 2, 64, dtype, MIXED))


@pytest.mark.parametrize("block_size", [1, 5, 100])
def test_any_block_size(block_size: int) -> None:
    check(Case(3, 1, 64, torch.float32, ((40, 41), (99, 100), (3, 40)), block_size))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_is_not_a_number_stays_in_its_row() -> None:
    case = Case(3, 1, 64, torch.float32, ((140, 141), (20, 21), (0, 40)))
    batch = case.batch()
    query, layer_kv = case.query(batch), case.layer_kv(batch)
    healthy = attend(case, batch, query, layer_kv)
    query[[1, 20]] = torch.nan
    found = attend(case, batch, query, layer_kv)
    sick = torch.zeros(len(query), dtype=torch.bool)
    sick[[1, 20]] = True
    assert found[sick].isnan().all() and torch.equal(found[~sick], healthy[~sick])


def test_a_plan_over_padded_rows_serves_one_batch_after_another() -> None:
    backend = make_attention("triton", Case(3, 1, 64, torch.float32, ()).shape, torch.float32)
    assert isinstance(backend, TritonAttention)
    rows = PaddedRows(4, 300, 16, torch.device("cpu"))
    plan = backend.decode_plan(rows.attended, rows.most_tokens)
    for spans in (((299, 300), (15, 16), (16, 17), (130, 131)), ((0, 1), (40, 41)), ((5, 6),)):
        case = Case(3, 1, 64, torch.float32, spans)
        batch = case.batch()
        query, layer_kv = case.query(batch), case.layer_kv(batch)
        rows.load(batch)
        padded = torch.full((4, *query.shape[1:]), torch.nan)
        padded[: len(spans)] = query
        found = plan.attend(padded, layer_kv)
        assert torch.equal(found[: len(spans)], attend(case, batch, query, layer_kv))
        assert (found[len(spans) :] == 0).all()
