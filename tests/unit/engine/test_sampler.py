"""The rules one by one: greedy choice, penalties, biases, masks, logprobs."""

from __future__ import annotations

import math

import pytest
import torch

from splitserve.engine.sampler import MIN_LOGPROB, sample
from tests.unit.engine.sampler_oracle import EOS, VOCAB, draw, random_logits, row

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
    [(0, False, 9), (1, False, 9), (2, False, EOS), (0, True, 9), (2, True, EOS)],
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


@pytest.mark.parametrize("penalty", [1e-300, 1e-38, 1e38, 1e300])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_absurd_penalty_still_draws_a_token(penalty: float, temperature: float) -> None:
    """A quotient beyond float32 must not poison the row, nor the batch it is in."""
    logits = random_logits(2, VOCAB)
    rows = [row([1, 2, 3], repetition_penalty=penalty, temperature=temperature), row([1, 2])]
    tokens = sample(logits, rows)
    assert all(0 <= token.token_id < VOCAB for token in tokens)
    assert tokens[1] == sample(logits[1:], rows[1:])[0]
