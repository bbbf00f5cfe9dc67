"""From a validated body to what workers need: defaults filled in, limits checked."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

from coordinator.http_api.prompts import Prompt, check_ids, check_text
from coordinator.http_api.schemas import MAX_SEED, Generation
from coordinator.limits import Limits
from coordinator.service import Order, Service
from splitserve.errors import InvalidRequestError
from splitserve.request import Sampling

# Below this a temperature only loses precision: it is greedy already (vLLM draws the same line).
MIN_TEMPERATURE = 1e-5
_TOKEN_ID = re.compile(r"[0-9]{1,9}", re.ASCII)
_DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


def order_of(
    service: Service,
    body: Generation,
    prompt: Prompt,
    *,
    default_max_tokens: int,
    logprobs: int | None,
) -> Order:
    """One prompt as the coordinator takes it. Raises InvalidRequestError, or UnavailableError
    before the limits are known."""
    limits = service.limits()
    num_prompt_tokens, num_choices = len(prompt.token_ids), body.n or 1
    max_tokens = _max_tokens(limits, body, num_prompt_tokens, default_max_tokens)
    limits.check_choices(num_prompt_tokens, num_choices)
    seed = secrets.randbits(63) if body.seed is None else body.seed & MAX_SEED
    return Order(
        prompt.token_ids,
        num_choices,
        seed,
        _sampling(service, body, max_tokens, logprobs),
        stops_of(body),
        priority=body.priority or 0,
        wants_timing=bool(body.return_timing),
    )


def stops_of(body: Generation) -> tuple[str, ...]:
    stops = [body.stop] if isinstance(body.stop, str) else (body.stop or [])
    return tuple(check_text(stop, "stop") for stop in stops)


def _max_tokens(limits: Limits, body: Generation, num_prompt_tokens: int, default: int) -> int:
    asked = body.max_tokens
    if body.max_completion_tokens is not None:
        asked = body.max_completion_tokens
    max_tokens = limits.resolve_max_tokens(num_prompt_tokens, asked, default)
    if (body.min_tokens or 0) > max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {body.min_tokens}, max_tokens only {max_tokens}", param="min_tokens"
        )
    return max_tokens


def _sampling(
    service: Service, body: Generation, max_tokens: int, logprobs: int | None
) -> Sampling:
    default = _defaults(service)

    def chosen(name: str) -> float:
        said: float | None = getattr(body, name)
        return default[name] if said is None else said

    vocab_size = service.facts.vocab_size
    temperature = chosen("temperature")
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=0.0 if temperature < MIN_TEMPERATURE else float(temperature),
        top_p=float(chosen("top_p")),
        top_k=max(0, int(chosen("top_k"))),
        min_p=float(chosen("min_p")),
        repetition_penalty=float(chosen("repetition_penalty")),
        presence_penalty=float(body.presence_penalty or 0.0),
        frequency_penalty=float(body.frequency_penalty or 0.0),
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        stop_token_ids=check_ids(body.stop_token_ids or (), vocab_size, "stop_token_ids"),
        eos_token_ids=service.facts.eos_token_ids,
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
    )


def _defaults(service: Service) -> dict[str, float]:
    if service.config.generation_config == "vllm":
        return dict(_DEFAULTS)
    return {**_DEFAULTS, **service.facts.default_sampling}


def _logit_bias(biases: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    found: dict[int, float] = {}
    for key, bias in biases.items():
        if not _TOKEN_ID.fullmatch(key) or int(key) >= vocab_size:
            raise InvalidRequestError(
                f"logit_bias has a key that is no token id from 0 to {vocab_size - 1}",
                param="logit_bias",
            )
        found[int(key)] = float(bias)
    return tuple(found.items())
