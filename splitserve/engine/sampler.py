"""Draws the next token of each row of logits.

Rules apply in this order: repetition, frequency and presence penalties; logit_bias and the mask of
min_tokens; temperature; min_p; top_k; top_p (of what min_p and top_k left). Their meanings are
vLLM's. Logprobs are of the logits before any of them.

A token is a pure function of its own row: logits, sampling parameters, history, seed, choice and
position. So that the other rows of a batch can't reach it even through rounding, everything summed
across the vocabulary is an integer, and an integer sum does not depend on its order. A token's
weight is its probability relative to the likeliest, in units of 2**-40.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from splitserve.engine.batch import SampleRow
from splitserve.request import SampledToken, Sampling, TokenLogprobs
from splitserve.scheduling.finish import held_back_ids

MIN_LOGPROB = -9999.0  # JSON has no -inf
MIN_TEMPERATURE = 1e-5  # below it, greedy: the likeliest token has probability 1 in f32 anyway
_WEIGHT_ONE = float(2**40)  # 2**40 x a vocabulary of 2**22 still fits 63 bits
# How many of the likeliest tokens are sorted first; nearly every top_k and top_p ends within them.
_CANDIDATES = (128, 2048)
_ROWS_AT_ONCE = 4
_Choose = Callable[[Tensor, list[SampleRow]], list[int]]
_LOWEST = torch.finfo(torch.float32).min


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
    """One token for each row; `logits` [rows, vocab] of any float type, any device, unchanged.

    A NaN counts as -inf. Where two tokens are equally likely, the lower id comes first.
    """
    assert logits.shape[0] == len(rows), (logits.shape, len(rows))
    plain = [i for i, row in enumerate(rows) if _is_plain(row)]
    if len(plain) == len(rows):
        return [SampledToken(token_id) for token_id in _argmax(logits)]
    sampled: dict[int, SampledToken] = {}
    if plain:
        token_ids = _argmax(logits[plain])
        sampled.update(zip(plain, map(SampledToken, token_ids), strict=True))
    others = [i for i in range(len(rows)) if i not in sampled]
    # On CPU a few rows at a time: their temporaries stay in cache, and stay allocated.
    step = _ROWS_AT_ONCE if logits.device.type == "cpu" else len(others)
    for start in range(0, len(others), step):
        part = others[start : start + step]
        results = _sample_others(_clean(logits[part]), [rows[i] for i in part])
        sampled.update(zip(part, results, strict=True))
    return [sampled[i] for i in range(len(rows))]


def uniform(row: SampleRow) -> float:
    """The number in [0, 1), a multiple of 2**-53, that decides this row's draw.

    Philox, a counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2,
    3", 2011), with seed and choice as its key and the position of the new token as its counter.
    """
    generator = np.random.Philox(
        counter=np.array([len(row.token_ids), 0, 0, 0], dtype=np.uint64),
        key=np.array([row.seed, row.choice_id], dtype=np.uint64),
    )
    return int(generator.random_raw() >> 11) * 2.0**-53


# -- rows by kind -----------------------------------------------------------------------------


def _is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < MIN_TEMPERATURE


def _is_plain(row: SampleRow) -> bool:
    return (
        _is_greedy(row.sampling)
        and row.sampling.logprobs is None
        and not row.sampling.logit_bias
        and not _has_penalties(row.sampling)
        and not _masks_stops(row)
    )


def _has_penalties(sampling: Sampling) -> bool:
    others = sampling.frequency_penalty, sampling.presence_penalty
    return sampling.repetition_penalty != 1.0 or any(others)


def _masks_stops(row: SampleRow) -> bool:
    return len(row.token_ids) - row.num_prompt_tokens < row.sampling.min_tokens


def _sample_others(x: Tensor, rows: list[SampleRow]) -> list[SampledToken]:
    """`x` [rows, vocab] f32, finite; overwritten."""
    logprobs = _Logprobs(x, rows)
    for logits, row in zip(x, rows, strict=True):
        _modify(logits, row)
    groups: dict[_Choose, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(_chooser(row.sampling), []).append(i)
    token_ids = [0] * len(rows)
    for choose, indices in groups.items():
        part = x if len(indices) == len(rows) else x[indices]
        for i, chosen in zip(indices, choose(part, [rows[i] for i in indices]), strict=True):
            token_ids[i] = chosen
    return logprobs.attach(token_ids)


def _chooser(sampling: Sampling) -> _Choose:
    if _is_greedy(sampling):
        return _choose_greedily
    filtered = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    return _choose_filtered if filtered else _choose_randomly


def _clean(logits: Tensor) -> Tensor:
    """A copy in f32 without NaN and infinities, which would spread through arithmetic."""
    highest = torch.finfo(torch.float32).max
    return logits.to(torch.float32, copy=True).nan_to_num_(_LOWEST, highest, _LOWEST)


def _argmax(logits: Tensor) -> list[int]:
    """Index of the largest of each row, the first of equals."""
    if logits.device.type != "cpu":
        return _checked_argmax(logits.argmax(-1), logits)
    # torch's own CPU argmax takes 25 times as long over bf16, 13 times over f32.
    best = torch.from_numpy(logits.float().numpy().argmax(-1))
    return _checked_argmax(best, logits)


def _checked_argmax(best: Tensor, logits: Tensor) -> list[int]:
    # A NaN wins every argmax, which is how it is found without a pass of its own.
    if bool(logits.gather(-1, best[:, None]).isnan().any()):
        return _argmax(_clean(logits))
    ids: list[int] = best.tolist()
    return ids


# -- logprobs ---------------------------------------------------------------------------------


class _Logprobs:
    """Log-probabilities of the rows that ask for them, taken before the logits are modified."""

    def __init__(self, x: Tensor, rows: list[SampleRow]) -> None:
        self._counts = {
            i: n for i, row in enumerate(rows) if (n := row.sampling.logprobs) is not None
        }
        self._values = x[list(self._counts)].log_softmax(-1).clamp_(min=MIN_LOGPROB)

    def attach(self, token_ids: list[int]) -> list[SampledToken]:
        results = [SampledToken(token_id) for token_id in token_ids]
        for values, (i, count) in zip(self._values, self._counts.items(), strict=True):
            logprobs = TokenLogprobs(float(values[token_ids[i]]), _top(values, count))
            results[i] = SampledToken(token_ids[i], logprobs)
        return results


def _top(values: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` highest of `values` [vocab] with their ids, best first."""
    if not count:
        return ()
    best = values.topk(min(count, len(values))).values
    length = torch.tensor([len(best)]).to(values.device)
    ids = _first_in_order(values[None], length, best[-1:])[0].nonzero().squeeze(-1)
    pairs = zip(ids.tolist(), values[ids].tolist(), strict=True)
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))


# -- penalties, biases, masks -----------------------------------------------------------------


def _modify(logits: Tensor, row: SampleRow) -> None:
    """Applies to `logits` [vocab] all that depends on the row's history, in place."""
    if _has_penalties(row.sampling):
        _penalize(logits, row)
    if row.sampling.logit_bias:
        ids, biases = zip(*row.sampling.logit_bias, strict=True)
        at = torch.tensor(ids).to(logits.device)
        logits[at] = (logits[at] + torch.tensor(biases).to(logits.device)).clamp_(_LOWEST, -_LOWEST)
    if _masks_stops(row):
        logits[[i for i in held_back_ids(row.sampling) if i < len(logits)]] = _LOWEST


def _penalize(logits: Tensor, row: SampleRow) -> None:
    """Repetition counts prompt and output; frequency and presence count output only."""
    sampling = row.sampling
    history = np.asarray(row.token_ids, dtype=np.int64)
    if sampling.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(history)).to(logits.device)
        values, penalty = logits[seen], sampling.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
        logits[seen] = logits[seen].clamp_(_LOWEST, -_LOWEST)
    ids, counts = np.unique(history[row.num_prompt_tokens :], return_counts=True)
    penalties = sampling.frequency_penalty * counts + sampling.presence_penalty
    at = torch.from_numpy(ids).to(logits.device)
    values = logits[at] - torch.from_numpy(penalties.astype(np.float32)).to(logits.device)
    logits[at] = values.clamp_(_LOWEST, -_LOWEST)


# -- choosing ---------------------------------------------------------------------------------


def _choose_greedily(x: Tensor, _: list[SampleRow]) -> list[int]:
    return _argmax(x)


def _choose_randomly(x: Tensor, rows: list[SampleRow]) -> list[int]:
    return _draw(_weights(x, x.amax(-1, keepdim=True), rows), rows)


def _choose_filtered(x: Tensor, rows: list[SampleRow]) -> list[int]:
    weights = _weights(x, x.amax(-1, keepdim=True), rows)
    return _draw(weights.mul_(_kept(x, weights, rows)), rows)


def _draw(weights: Tensor, rows: list[SampleRow]) -> list[int]:
    """Inverse of the cumulative distribution, tokens in order of id; `weights` [rows, vocab]."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    numbers = torch.tensor([[uniform(row)] for row in rows], dtype=torch.float64).to(weights.device)
    # The product may round up to the total, which belongs to no token.
    target = torch.minimum((total * numbers).to(torch.int64), total - 1)
    ids: list[int] = torch.searchsorted(cumulative, target, right=True).squeeze(-1).tolist()
    return ids


def _weights(x: Tensor, highest: Tensor, rows: list[SampleRow]) -> Tensor:
    """Integers [rows, n] in proportion to probability; the likeliest token's is 2**40."""
    values = [[row.sampling.temperature] for row in rows]
    temperatures = torch.tensor(values, dtype=torch.float32).to(x.device)
    return ((x - highest).div_(temperatures).exp_() * _WEIGHT_ONE).to(torch.int64)


def _kept(x: Tensor, weights: Tensor, rows: list[SampleRow]) -> Tensor:
    """Which tokens [rows, vocab] min_p, top_k and top_p leave: those before a place in the order.

    That order is by logit, the lower id first among equals, so top_k = 1 is the greedy token.
    """
    vocab = x.shape[-1]
    lengths = torch.zeros(len(rows), dtype=torch.int64, device=x.device)
    borders = torch.zeros(len(rows), dtype=x.dtype, device=x.device)
    todo = torch.arange(len(rows), device=x.device)
    for size in (*(n for n in _CANDIDATES if n < vocab), vocab):
        some = len(todo) < len(rows)
        best = _highest(x[todo] if some else x, size)
        part = [rows[i] for i in todo.tolist()]
        found, length = _prefix_length(best, weights[todo] if some else weights, part)
        lengths[todo] = length
        borders[todo] = best.gather(-1, (length - 1)[:, None]).squeeze(-1)
        todo = todo[~found]
        if not len(todo):
            break
    return _first_in_order(x, lengths, borders)


def _highest(x: Tensor, size: int) -> Tensor:
    """The `size` highest logits of each row, descending."""
    if size == x.shape[-1] and x.device.type == "cpu":  # numpy sorts 4 times as fast as torch
        return torch.from_numpy(np.sort(x.numpy(), axis=-1)[:, ::-1].copy())
    return x.topk(size).values


def _prefix_length(best: Tensor, weights: Tensor, rows: list[SampleRow]) -> tuple[Tensor, Tensor]:
    """How many tokens of each row stay, and whether `best` was enough to tell.

    `best` [rows, size] holds the highest logits, descending; `weights` [rows, vocab] all weights.
    Returns (found, length), [rows] each.
    """
    size, vocab = best.shape[-1], weights.shape[-1]
    sampling = [row.sampling for row in rows]
    top_k = torch.tensor([min(s.top_k or vocab, vocab) for s in sampling]).to(best.device)
    top_p = torch.tensor([s.top_p for s in sampling], dtype=torch.float64).to(best.device)
    min_p = torch.tensor([s.min_p for s in sampling], dtype=torch.float64).to(best.device)
    length = top_k
    if any(s.min_p > 0.0 for s in sampling):
        likely = (weights >= (min_p * _WEIGHT_ONE)[:, None]).sum(-1)
        length = torch.minimum(top_k, likely)
    cumulative = _weights(best, best[:, :1], rows).cumsum(-1)
    within = length <= size
    last = (length.clamp(max=size) - 1)[:, None]
    total = torch.where(within, cumulative.gather(-1, last).squeeze(-1), weights.sum(-1))
    nucleus = (cumulative < (top_p * total)[:, None]).sum(-1) + 1
    # A length between size and vocab needs a sum that is known from a longer `best` only.
    found = within | ((length == vocab) & (nucleus <= size))
    return found, torch.minimum(length, nucleus).clamp(max=size)


def _first_in_order(x: Tensor, lengths: Tensor, borders: Tensor) -> Tensor:
    """The first `lengths` tokens of each row; `borders` holds the logit of the last of them."""
    keep = x >= borders[:, None]
    surplus = (keep.sum(-1) - lengths).tolist()
    for i, count in enumerate(surplus):
        if count > 0:  # as many tokens too many, equal to the last: those with the highest ids
            equal = (x[i] == borders[i]).nonzero().squeeze(-1)
            keep[i, equal[-count:]] = False
    return keep
