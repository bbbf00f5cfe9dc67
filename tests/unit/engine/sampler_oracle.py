"""What the sampler must do, once more: in float64, from the rules and not from the code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from splitserve.engine.batch import SampleRow
from splitserve.engine.sampler import sample
from splitserve.request import Sampling

Floats = npt.NDArray[Any]
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


def oracle_logits(logits: Floats, r: SampleRow) -> Floats:
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


def oracle_distribution(logits: Floats, r: SampleRow) -> Floats:
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
    probabilities: Floats = result / result.sum()
    return probabilities


def assert_draws_from(distribution: Floats, token_id: int, u: float) -> None:
    """token_id is where the cumulative distribution passes u, give or take rounding."""
    cumulative = distribution.cumsum()
    assert distribution[token_id] > 0
    assert cumulative[token_id] > u - 1e-6
    assert cumulative[token_id] - distribution[token_id] < u + 1e-6
