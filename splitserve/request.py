"""What a request asks for: the public `SamplingParams`, and the part of it that workers need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a prompt. Names and meanings follow vLLM's.

    `max_tokens=None` means the rest of the context. `top_k` of 0 or -1 means the whole vocabulary.
    `logprobs=k` returns the log-probability of each sampled token and of the k likeliest.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a worker needs to draw a token and to know whether it was the last.

    Resolved and validated by the coordinator: nothing here is optional except logprobs. Stop
    strings are not here (they belong to the coordinator), nor are seeds (one per choice).
    `temperature == 0` is greedy; `top_k == 0` keeps the whole vocabulary.
    Penalties and min_tokens count from `num_prompt_tokens` of the token history:
    repetition_penalty looks at prompt and output, presence and frequency at output only.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability (natural log, of the unmodified logits) of a sampled token.

    `top` holds (token_id, logprob) of the likeliest tokens, best first; -inf is clamped to -9999.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the n answers to a prompt."""

    choice_id: int
    seed: int  # 0 <= seed < 2**63


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Consecutive output tokens of one choice. `first_index` counts output tokens from 0."""

    request_id: str
    attempt: int
    choice_id: int
    first_index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one for each token, when asked for
    finish: FinishReason | None = None
