"""Random draws: from the right distribution, and the same whoever shares the batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.engine.batch import SampleRow
from splitserve.engine.sampler import sample, uniform
from tests.unit.engine.sampler_oracle import (
    EOS,
    VOCAB,
    assert_draws_from,
    draw,
    oracle_distribution,
    random_logits,
    row,
)

# -- drawing ----------------------------------------------------------------------------------


sampling_fields = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.05, 0.7, 1.0, 2.0, 50.0]),
        "top_p": st.sampled_from([1.0, 0.95, 0.5, 1e-9]),
        "top_k": st.sampled_from([0, 1, 2, 20, VOCAB, 10 * VOCAB]),
        "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
        "presence_penalty": st.sampled_from([0.0, 1.5, -1.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.4]),
        "min_tokens": st.sampled_from([0, 9]),
        "logit_bias": st.sampled_from([(), ((3, 4.0), (90, -100.0))]),
    }
)


@settings(max_examples=200, deadline=None)
@given(
    fields=sampling_fields,
    history=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_mix_of_rules_draws_from_the_oracles_distribution(
    fields: dict[str, Any], history: list[int], seed: int
) -> None:
    logits = random_logits(1, VOCAB, seed=seed % 1000)
    r = row(history, 1 + len(history) // 2, seed, eos_token_ids=(EOS,), **fields)
    [token_id] = draw(logits, r)
    distribution = oracle_distribution(logits[0].numpy(), r)
    assert_draws_from(distribution, token_id, uniform(r))


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
def test_a_nucleus_of_any_size_is_found(scale: float, top_p: float) -> None:
    """From a handful of a large vocabulary to nearly all of it, beyond the first candidates."""
    logits = random_logits(6, 5000, scale=scale)
    rows = [row(temperature=1.0, top_p=top_p, seed=i) for i in range(6)]
    for x, r, token_id in zip(logits, rows, draw(logits, *rows), strict=True):
        assert_draws_from(oracle_distribution(x.numpy(), r), token_id, uniform(r))


def test_ties_at_the_border_go_to_the_lower_ids() -> None:
    logits = torch.zeros(300, VOCAB)
    rows = [row(temperature=1.0, top_k=4, seed=i) for i in range(300)]
    assert set(draw(logits, *rows)) == {0, 1, 2, 3}


def test_drawn_frequencies_follow_the_distribution() -> None:
    num_draws, num_ids = 20_000, 12
    logits = random_logits(1, num_ids, scale=1.0)
    rows = [row(temperature=1.3, seed=i) for i in range(num_draws)]
    counts = np.bincount(draw(logits.expand(num_draws, -1), *rows), minlength=num_ids)
    expected = oracle_distribution(logits[0].numpy(), rows[0]) * num_draws
    chi_square = float((((counts - expected) ** 2) / expected).sum())
    assert chi_square < 40.0  # 11 degrees of freedom: exceeded by chance once in 30,000


def test_draws_are_independent_along_each_key() -> None:
    """Neighbouring seeds, choices and positions share nothing that a correlation can see."""
    for numbers in (
        [uniform(row(seed=i)) for i in range(4000)],
        [uniform(row(choice_id=i)) for i in range(4000)],
        [uniform(row([1] * i)) for i in range(1, 4001)],
    ):
        values = np.array(numbers)
        assert 0.0 <= values.min() < 0.01 and 0.99 < values.max() < 1.0
        assert abs(values.mean() - 0.5) < 0.02
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.06


def test_the_draw_depends_on_seed_choice_and_position_and_on_nothing_else() -> None:
    base = row([4, 5, 6], seed=2**63 - 1, choice_id=3)
    assert uniform(base) == uniform(replace(base, token_ids=[9, 9, 9], num_prompt_tokens=1))
    others = (
        replace(base, seed=1),
        replace(base, choice_id=4),
        replace(base, token_ids=[4, 5, 6, 7]),
    )
    assert len({uniform(r) for r in (base, *others)}) == 4


def test_the_generator_never_changes() -> None:
    """Streams begun before an upgrade must go on after it: these numbers are part of the format."""
    assert uniform(row([1] * 5, seed=42, choice_id=1)) == pytest.approx(PINNED, abs=0)


PINNED = 0.5167500095191799


# -- batches ----------------------------------------------------------------------------------


def mixed_rows() -> list[SampleRow]:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 50},
        {"temperature": 1.0, "top_p": 0.9, "logprobs": 4},
        {"logprobs": 2},
        {"frequency_penalty": 1.0, "repetition_penalty": 1.2},
        {"temperature": 1.5, "min_p": 0.1, "logit_bias": ((3, 4.0),)},
        {"temperature": 5.0, "top_p": 0.99, "top_k": 700},
    ]
    return [row([1, 2, i, i], 2, seed=i, **kinds[i % len(kinds)]) for i in range(15)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1000, 3001])
def test_a_row_is_bit_equal_alone_and_among_fourteen_others(dtype: torch.dtype, vocab: int) -> None:
    logits = random_logits(15, vocab).to(dtype)
    rows = mixed_rows()
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [r])[0] for i, r in enumerate(rows)]
    assert together[::-1] == sample(logits.flip(0), rows[::-1])


def test_neighbours_full_of_nan_change_nothing() -> None:
    logits = random_logits(2, VOCAB)
    logits[1] = math.nan
    for r in mixed_rows():
        assert sample(logits, [r, r])[0] == sample(logits[:1], [r])[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_yield_a_token_all_the_same(bad: float) -> None:
    some, all_bad = random_logits(15, VOCAB), torch.full((15, VOCAB), bad)
    some[:, 10:20] = bad
    for logits in (some, all_bad, some.bfloat16()):
        for token in sample(logits, mixed_rows()):
            assert 0 <= token.token_id < VOCAB
            if token.logprobs is not None:
                assert math.isfinite(token.logprobs.logprob)
    if bad != math.inf:
        ids = draw(some, *mixed_rows())
        assert not set(ids) & set(range(10, 20))
