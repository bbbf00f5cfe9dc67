"""The sampler against a small oracle in float64, written from the rules and not from the code."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.engine.batch import SampleRow
from splitserve.engine.sampler import MIN_LOGPROB, sample, uniform
from splitserve.request import Sampling

VOCAB = 97
EOS = 5


def row(
    token_ids: Sequence[int] = (1, 2, 3), num_prompt_tokens: int = 3, seed: int = 7, **kwargs: Any
) -> SampleRow:
    kwargs.setdefault("max_tokens", 100)
    choice_id = kwargs.pop("choice_id", 0)
    return SampleRow(Sampling(**kwargs), seed, choice_id, num_prompt_tokens, list(token_ids))


def draw(logits: torch.Tensor, *rows: SampleRow) -> list[int]:
    return [token.token_id for token in sample(logits, rows)]


def random_logits(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


# -- the oracle -------------------------------------------------------------------------------


def oracle_logits(logits: np.ndarray, r: SampleRow) -> np.ndarray:
    s, x = r.sampling, logits.astype(np.float64).copy()
    output = list(r.token_ids[r.num_prompt_tokens :])
    for t in set(r.token_ids):
        x[t] = x[t] / s.repetition_penalty if x[t] > 0 else x[t] * s.repetition_penalty
    for t, count in Counter(output).items():
        x[t] -= s.frequency_penalty * count + s.presence_penalty
    for t, bias in s.logit_bias:
        x[t] += bias
    if len(output) < s.min_tokens:
        stops = set(s.stop_token_ids) | (set() if s.ignore_eos else set(s.eos_token_ids))
        x[list(stops)] = -np.inf
    return x


def oracle_distribution(logits: np.ndarray, r: SampleRow) -> np.ndarray:
    s = r.sampling
    x = oracle_logits(logits, r)
    p = np.exp((x - x.max()) / s.temperature)
    order = np.lexsort((np.arange(len(x)), -x))  # by logit, then by id
    kept = [t for t in order if p[t] >= s.min_p * p.max()]
    kept = kept[: s.top_k or len(kept)]
    total, running, nucleus = sum(p[t] for t in kept), 0.0, []
    for t in kept:
        nucleus.append(t)
        running += p[t]
        if running >= s.top_p * total:
            break
    result = np.zeros(len(x))
    result[nucleus] = p[nucleus]
    return result / result.sum()


def assert_draws_from(distribution: np.ndarray, token_id: int, u: float) -> None:
    """token_id is where the cumulative distribution passes u, give or take rounding."""
    cumulative = distribution.cumsum()
    assert distribution[token_id] > 0
    assert cumulative[token_id] > u - 1e-6
    assert cumulative[token_id] - distribution[token_id] < u + 1e-6


# -- greedy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_is_the_first_of_the_highest(dtype: torch.dtype) -> None:
    logits = random_logits(16, VOCAB).to(dtype)
    logits[3, 40] = logits[3, 60] = 50.0
    expected = logits.float().numpy().argmax(-1).tolist()
    assert draw(logits, *[row()] * 16) == expected
    assert expected[3] == 40


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-9, 1e-6, 1e-4])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = random_logits(50, VOCAB)
    rows = [row(temperature=temperature, seed=i) for i in range(50)]
    assert draw(logits, *rows) == logits.argmax(-1).tolist()


def test_top_k_of_one_is_greedy_even_when_hot_and_tied() -> None:
    logits = random_logits(20, VOCAB)
    logits[:, [30, 20, 70]] = 99.0
    rows = [row(temperature=1e9, top_k=1, seed=i) for i in range(20)]
    assert draw(logits, *rows) == [20] * 20


def test_rows_do_not_change_the_logits() -> None:
    logits = random_logits(3, VOCAB)
    before = logits.clone()
    sample(logits, [row(logit_bias=((3, 5.0),)), row(temperature=1.0, top_p=0.5), row(logprobs=2)])
    assert torch.equal(logits, before)


# -- penalties, biases, masks -----------------------------------------------------------------


def test_frequency_counts_each_output_token_and_no_prompt_token() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 8], logits[0, 9] = 2.5, 1.0  # 8 wins until it has been said twice
    history = [8, 8, 8, 8]
    for num_said, expected in ((0, 8), (1, 8), (2, 9)):
        r = row(history + [8] * num_said, num_prompt_tokens=4, frequency_penalty=1.0)
        assert draw(logits, r) == [expected]


def test_presence_is_taken_once() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 8], logits[0, 9] = 2.5, 1.0
    assert draw(logits, row([1, 8, 8, 8], 1, presence_penalty=1.0)) == [8]
    assert draw(logits, row([1, 8], 1, presence_penalty=2.0)) == [9]
    assert draw(logits, row([1, 8], 2, presence_penalty=2.0)) == [8]


def test_repetition_counts_the_prompt_and_pushes_both_signs_down() -> None:
    logits = torch.full((1, VOCAB), -8.0)
    logits[0, 8], logits[0, 9] = 2.0, 1.5
    assert draw(logits, row([8], 1, repetition_penalty=2.0)) == [9]
    negative = torch.full((1, VOCAB), -8.0)
    negative[0, 8], negative[0, 9] = -1.0, -1.5
    assert draw(negative, row([8], 1, repetition_penalty=2.0)) == [9]


def test_logit_bias_forbids_and_forces() -> None:
    logits = random_logits(1, VOCAB)
    best, second = logits[0].topk(2).indices.tolist()
    assert draw(logits, row(logit_bias=((best, -100.0),))) == [second]
    assert draw(logits, row(logit_bias=((77, 100.0),), temperature=1.0)) == [77]


@pytest.mark.parametrize(
    ("num_output", "ignore_eos", "expected"),
    [(0, False, 9), (1, False, 9), (2, False, EOS), (0, True, EOS)],
)
def test_min_tokens_masks_the_ids_that_would_stop(
    num_output: int, ignore_eos: bool, expected: int
) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS], logits[0, 6], logits[0, 9] = 9.0, 8.0, 7.0
    r = row(
        [1] * (3 + num_output),
        min_tokens=2,
        eos_token_ids=(EOS,),
        stop_token_ids=(6, VOCAB + 3),  # one that the model can't say is harmless
        ignore_eos=ignore_eos,
    )
    assert draw(logits, r) == [expected]


def test_min_tokens_masks_after_the_bias() -> None:
    r = row(min_tokens=1, eos_token_ids=(EOS,), logit_bias=((EOS, 100.0),))
    assert draw(torch.zeros(1, VOCAB), r) == [0]


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


# -- logprobs ---------------------------------------------------------------------------------


def test_logprobs_are_of_the_unmodified_logits() -> None:
    logits = random_logits(1, VOCAB)
    expected = logits[0].double().log_softmax(-1)
    best = int(expected.argmax())
    r = row(logprobs=3, logit_bias=((best, -100.0),), temperature=0.5, top_k=1)
    [token] = sample(logits, [r])
    assert token.logprobs is not None
    assert token.token_id != best
    assert token.logprobs.logprob == pytest.approx(float(expected[token.token_id]), abs=1e-5)
    values, ids = expected.topk(3)
    assert [t for t, _ in token.logprobs.top] == ids.tolist()
    assert [p for _, p in token.logprobs.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_zero_reports_the_token_alone_and_too_many_the_whole_vocabulary() -> None:
    logits = random_logits(2, VOCAB)
    none, every = sample(logits, [row(logprobs=0), row(logprobs=10**6)])
    assert none.logprobs is not None and none.logprobs.top == ()
    assert every.logprobs is not None and len(every.logprobs.top) == VOCAB
    assert sum(math.exp(p) for _, p in every.logprobs.top) == pytest.approx(1.0, abs=1e-5)


def test_an_impossible_token_has_a_finite_logprob() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 4] = 1.0
    [token] = sample(logits, [row(logprobs=2)])
    assert token.logprobs is not None
    assert token.logprobs.top == ((4, 0.0), (0, MIN_LOGPROB))
