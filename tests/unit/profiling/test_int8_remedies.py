"""What narrower numbers give: to weights, to KV and to products, each by itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.unit.profiling.evidences import busy
from tests.unit.profiling.test_remedies import COMPUTE, DECODE, PREFILL, remedy, titles

INT8_KV: dict[str, Any] = {"kv_token_bytes": 10_625}
INT8_WEIGHTS: dict[str, Any] = {"weight_bytes_per_number": 1}
NOT_KNOWN: dict[str, Any] = {"weight_bytes_per_number": 0, "kv_int8_token_bytes": 0}


@pytest.mark.parametrize(
    ("changes", "offered"),
    [
        ({}, ["KV", "weights"]),
        (INT8_KV, ["weights"]),
        (INT8_WEIGHTS, ["KV"]),
        (INT8_KV | INT8_WEIGHTS, []),
        (NOT_KNOWN, []),
    ],
)
def test_what_is_int8_already_is_not_made_so_again(
    changes: dict[str, Any], offered: list[str]
) -> None:
    """Weights and KV are stored each in its own way."""
    facts = dataclasses.replace(DECODE, **changes)
    found = [title.split()[1].strip(":") for title in titles(busy(), facts) if "int8" in title]
    assert sorted(found) == offered
    gaps = busy(window_s=2.0, kv_wait_s=1.0)
    assert any("smaller KV" in title for title in titles(gaps, facts)) == ("KV" in offered)


def test_a_gpu_is_not_told_of_flags_that_are_for_cpus() -> None:
    found = titles(busy(), dataclasses.replace(DECODE, device="cuda:0"))
    assert "quantised weights: int8, which GPUs do not have yet" in found
    assert not any("--" in title for title in found)


@pytest.mark.parametrize(
    ("width", "title", "then_ms"),
    [
        (4, "lower precision: --dtype bfloat16", 20),  # FLOPs; bytes are 10 of weights, 7 of KV
        (2, "lower precision: products of 8 bits", 20),
        (1, "lower precision: products of 8 bits", 27),  # bytes: weights are narrow already
    ],
)
def test_narrower_products_take_half_the_time(width: int, title: str, then_ms: float) -> None:
    """Which int8 weights are not: they are widened before."""
    evidence = busy(**COMPUTE)
    facts = dataclasses.replace(PREFILL, weight_bytes_per_number=width, **INT8_KV)
    found = remedy(evidence, facts, "lower precision")
    assert found.title == title
    assert found.speedup == pytest.approx(1 / (1 - 0.9 * (1 - then_ms / 40)))
    assert not any("quantised" in one for one in titles(evidence, facts))
