"""The parts of each decode row put together."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from splitserve.engine.triton_kernels.decode import DecodeRows
from splitserve.engine.triton_kernels.parts import (
    LEAST_PART_TOKENS,
    MOST_PARTS,
    PART_STEP,
    Partials,
    part_tokens,
)

_PARTS_AT_ONCE = 16


@triton.jit(do_not_specialize=["num_parts"])
def _merge_parts(  # noqa: PLR0913 - a kernel has no other way to be told
    sums: tl.tensor,
    stats: tl.tensor,
    num_parts: tl.tensor,
    token_rows: tl.tensor,
    context_lens: tl.tensor,
    output: tl.tensor,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    least: tl.constexpr,
    step: tl.constexpr,
    most_parts: tl.constexpr,
    padded_dim: tl.constexpr,
    at_once: tl.constexpr,
) -> None:
    row, head = tl.program_id(0), tl.program_id(1)
    context = tl.load(context_lens + row)
    present = tl.cdiv(context, part_tokens(context, least, step, most_parts))
    first = (row.to(tl.int64) * num_heads + head) * num_parts
    dims = tl.arange(0, padded_dim)
    token = tl.load(token_rows + row).to(tl.int64)
    target = output + (token * num_heads + head) * head_dim + dims
    result = tl.zeros([padded_dim], tl.float32)
    if present == 0:
        tl.store(target, result.to(output.dtype.element_ty), mask=dims < head_dim)
        return

    # Always over as many parts as there can be, so that a row's sum has one order.
    parts = tl.arange(0, most_parts)
    places = (first + parts) * 2
    high = tl.load(stats + places, mask=parts < present, other=float("-inf"))
    highest = tl.max(high, 0)
    share = tl.load(stats + places + 1, mask=parts < present, other=0.0)
    total = tl.sum(tl.where(parts < present, share * tl.exp2(high - highest), 0.0), 0)

    for begin in range(0, present, at_once):
        some = begin + tl.arange(0, at_once)
        here = some < present
        highs = tl.load(stats + (first + some) * 2, mask=here, other=float("-inf"))
        seen = tl.load(
            sums + (first + some)[:, None] * head_dim + dims[None, :],
            mask=here[:, None] & (dims < head_dim)[None, :],
            other=0.0,
        )
        result += tl.sum(seen * tl.exp2(highs - highest)[:, None], 0)
    tl.store(target, (result / total).to(output.dtype.element_ty), mask=dims < head_dim)


def merge_parts(partials: Partials, rows: DecodeRows, output: Tensor) -> None:
    """Write the rows' results into `output`, [num_tokens, num_heads * head_dim], contiguous."""
    num_rows, num_heads, num_parts, head_dim = partials.sums.shape
    assert output.is_contiguous() and output.shape[1] == num_heads * head_dim
    _merge_parts[(num_rows, num_heads)](
        partials.sums,
        partials.stats,
        num_parts,
        rows.token_rows,
        rows.context_lens,
        output,
        num_heads=num_heads,
        head_dim=head_dim,
        least=LEAST_PART_TOKENS,
        step=PART_STEP,
        most_parts=MOST_PARTS,
        padded_dim=triton.next_power_of_2(head_dim),
        at_once=_PARTS_AT_ONCE,
        num_warps=2,
    )
