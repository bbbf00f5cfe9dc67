"""Paged attention kernels against attention one sequence at a time: every shape, and long rows."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases import DECODE_SPANS, PREFILL_SPANS, SHAPES, Case, Spans, reference
from tests.kernels.interpreted.checks import attend, check

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spans", [DECODE_SPANS, PREFILL_SPANS], ids=["decode", "prefill"])
def test_equals_reference(spans: Spans, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(Case(*shape, dtype, spans))


def test_a_long_context_has_longer_parts_not_more_of_them() -> None:
    check(Case(3, 1, 64, torch.bfloat16, ((8191, 8192), (8192, 8193), (9, 10)), block_size=256))


def test_scores_far_apart() -> None:
    case = Case(4, 1, 64, torch.float32, ((299, 300), (30, 90)))
    batch = case.batch()
    query, layer_kv = case.query(batch) * 30, case.layer_kv(batch)
    found, expected = attend(case, batch, query, layer_kv), reference(case, batch, query, layer_kv)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@DTYPES
@pytest.mark.parametrize("span", [(260, 261), (30, 80)], ids=["decode", "prefill"])
def test_a_sequence_does_not_depend_on_its_batch_mates(
    span: tuple[int, int], dtype: torch.dtype
) -> None:
    """Bit for bit: alone, among equals, beside a longer row, beside chunks."""
    results = []
    num_tokens = span[1] - span[0]
    batch_mates: tuple[Spans, ...] = ((), (span,), ((700, 701),), ((0, 33), (3, 9)))
    for others in batch_mates:
        case = Case(3, 1, 64, dtype, (span, *others))
        batch = case.batch()
        query = torch.randn(len(batch.positions), 3, 64).to(dtype)
        query[:num_tokens] = torch.linspace(-2, 2, num_tokens * 3 * 64).view(-1, 3, 64)
        results.append(attend(case, batch, query, case.layer_kv(batch))[:num_tokens])
    assert all(torch.equal(result, results[0]) for result in results)
