"""What is asked of a server: workloads by name, and the prompts in them.

Prompts are seeded random token ids, so that two servers of one model get the same work and no
tokenizer is needed. Answers are greedy, ignore EOS, and stream.
"""

from __future__ import annotations

import difflib
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from splitserve.errors import ConfigError

_FIRST_TOKEN_ID = 1000  # low ids are often special tokens
_WARM_UP_TOKENS = 8  # of each answer
_WARM_UP_STREAM_TOKENS = 16
_FRESH_SEEDS = 1 << 30
_WARM_UP_SEEDS = 1 << 32  # above those of measured runs: warm-up leaves none of their prefixes


@dataclass(frozen=True, slots=True)
class BenchSpec:
    """Requests of one shape. Exactly one of `concurrency` (clients, each asking again when it has
    its answer) and `request_rate` (Poisson arrivals, requests/s) is set."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int | None = None
    request_rate: float | None = None
    shared_prefix_tokens: int = 0  # of the prompt, the same in every request
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    vocab_size: int = 32000
    seed: int = 0
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class MixedSpec:
    """Streams that always run, and long prompts that arrive on a schedule.

    First a stretch of `undisturbed_s` with the streams alone, then `duration_s` with a long prompt
    at its start and after each `period_s`. Until all of those are answered, streams are replaced.
    """

    num_streams: int = 4
    stream_prompt_tokens: int = 32
    stream_output_tokens: int = 400
    long_prompt_tokens: int = 2000
    long_output_tokens: int = 16
    period_s: float = 8.0
    undisturbed_s: float = 15.0
    duration_s: float = 60.0
    vocab_size: int = 32000
    seed: int = 0
    timeout_s: float = 600.0


Spec = BenchSpec | MixedSpec
# Of either kind of workload: its name, and whether it is a whole number.
SPEC_FIELDS: Mapping[str, bool] = {
    field.name: "float" not in str(field.type) for field in (*fields(BenchSpec), *fields(MixedSpec))
}

WORKLOADS: Mapping[str, Spec] = {
    "w1": BenchSpec(num_requests=32, prompt_tokens=256, output_tokens=64, concurrency=16),
    "w2": BenchSpec(
        num_requests=32,
        prompt_tokens=512 + 32,
        output_tokens=32,
        concurrency=16,
        shared_prefix_tokens=512,
    ),
    "w3": MixedSpec(),
    "single": BenchSpec(num_requests=8, prompt_tokens=256, output_tokens=64, concurrency=1),
}


def workload_of(name: str, given: Mapping[str, Any]) -> Spec:
    """A workload with some fields changed; those given as None stay. Raises ConfigError."""
    spec = WORKLOADS[name]
    changes = {key: value for key, value in given.items() if value is not None}
    known = [field.name for field in fields(spec)]
    for key in changes:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {_option(near[0])}?" if near else ""
            raise ConfigError(f"workload {name} has no {_option(key)}{hint}")
    if changes.get("request_rate") is not None:
        if "concurrency" in changes:
            raise ConfigError("give --concurrency or --request-rate, not both")
        changes["concurrency"] = None
    changed = replace(spec, **changes)
    if isinstance(changed, BenchSpec) and changed.shared_prefix_tokens > changed.prompt_tokens:
        raise ConfigError(
            f"--shared-prefix-tokens {changed.shared_prefix_tokens} is above "
            f"--prompt-tokens {changed.prompt_tokens}"
        )
    return changed


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


def warm_up_of(spec: Spec, num_requests: int | None = None) -> Spec | None:
    """What to send before a run is measured: prompts of the same shapes, short answers.

    `num_requests` defaults to as many as run at once, so that the batch sizes are met too; None is
    returned for 0. Of a mixed load it is always one round: every stream, and one long prompt.
    """
    if num_requests == 0:
        return None
    seed = spec.seed + _WARM_UP_SEEDS
    if isinstance(spec, MixedSpec):
        return replace(
            spec,
            stream_output_tokens=min(spec.stream_output_tokens, _WARM_UP_STREAM_TOKENS),
            undisturbed_s=0.0,
            duration_s=min(0.001, spec.period_s),
            seed=seed,
        )
    at_once = spec.concurrency or 4
    number = at_once if num_requests is None else num_requests
    return replace(
        spec,
        num_requests=number,
        output_tokens=min(spec.output_tokens, _WARM_UP_TOKENS),
        concurrency=min(number, at_once),
        request_rate=None,
        seed=seed,
    )


def fresh_seed() -> int:
    """For prompts that no server has in a cache from an earlier run."""
    return secrets.randbelow(_FRESH_SEEDS)


def make_prompts(spec: BenchSpec) -> list[list[int]]:
    """The prompts of a run: token ids, the same for the same seed."""
    draw = random.Random(f"prompts {spec.seed}")  # text: numbers as seeds can collide
    shared = _ids(draw, spec.shared_prefix_tokens, spec.vocab_size)
    own = spec.prompt_tokens - spec.shared_prefix_tokens
    return [shared + _ids(draw, own, spec.vocab_size) for _ in range(spec.num_requests)]


def arrival_times_s(spec: BenchSpec) -> list[float]:
    """When each request of a Poisson process is due, from the first one on, seeded."""
    assert spec.request_rate is not None
    draw = random.Random(f"arrivals {spec.seed}")
    times_s = [0.0]
    for _ in range(spec.num_requests - 1):
        times_s.append(times_s[-1] + draw.expovariate(spec.request_rate))
    return times_s


def mixed_prompt(spec: MixedSpec, kind: str, number: int) -> list[int]:
    """The prompt of a stream or of a long prompt; no two share a prefix but by chance."""
    draw = random.Random(f"{kind} {number} {spec.seed}")
    is_stream = kind == "stream"
    count = spec.stream_prompt_tokens if is_stream else spec.long_prompt_tokens
    return _ids(draw, count, spec.vocab_size)


def _ids(draw: random.Random, count: int, vocab_size: int) -> list[int]:
    return [draw.randrange(_FIRST_TOKEN_ID, vocab_size) for _ in range(count)]


def request_body(spec: BenchSpec, model: str, prompt: Sequence[int]) -> dict[str, Any]:
    """The JSON of one completion request."""
    return completion_body(model, prompt, spec.output_tokens)


def completion_body(model: str, prompt: Sequence[int], output_tokens: int) -> dict[str, Any]:
    """The JSON of a request for exactly so many tokens."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,  # where it is known, chunks say how many tokens they hold
    }
