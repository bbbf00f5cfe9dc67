"""Load for any OpenAI-compatible server, and what its users would have felt.

Prompts are seeded random token ids, so that two servers of one model get the same work and no
tokenizer is needed. Answers are greedy, ignore EOS, and stream.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from splitserve.bench_http import RawReply, Target, post, target_of
from splitserve.errors import SplitserveError
from splitserve.sse import DONE, EventParser

_FIRST_TOKEN_ID = 1000  # low ids are often special tokens
_MS = 1000.0


@dataclass(frozen=True, slots=True)
class BenchSpec:
    """One run. Exactly one of `concurrency` and `request_rate` (Poisson, requests/s) is set."""

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
class Outcome:
    """One request as its client saw it. `token_times_s` counts from sending; a chunk of several
    tokens gives each its own entry."""

    token_times_s: tuple[float, ...]
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        if len(self.token_times_s) < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (len(self.token_times_s) - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between neighbouring tokens; the first is the hand-off gap."""
        times = self.token_times_s
        return [later - earlier for earlier, later in itertools.pairwise(times)]


@dataclass(frozen=True, slots=True)
class Report:
    """The numbers of a run. Distributions map "p50", "p95", "p99", "mean" to milliseconds."""

    num_requests: int
    num_completed: int
    wall_s: float
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Mapping[str, float]
    handoff_gap_ms: Mapping[str, float]
    tpot_ms: Mapping[str, float]
    itl_ms: Mapping[str, float]
    num_within_slo: int | None  # None: no SLO given
    goodput_per_s: float | None
    client_cpu_share: float  # of one core, spent by this client
    errors: Mapping[str, int] = field(default_factory=dict)


def make_prompts(spec: BenchSpec) -> list[list[int]]:
    """The prompts of a run: token ids, the same for the same seed."""
    draw = random.Random(spec.seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(_FIRST_TOKEN_ID, spec.vocab_size) for _ in range(count)]

    shared = ids(spec.shared_prefix_tokens)
    own = spec.prompt_tokens - spec.shared_prefix_tokens
    return [shared + ids(own) for _ in range(spec.num_requests)]


def request_body(spec: BenchSpec, model: str, prompt: Sequence[int]) -> dict[str, Any]:
    """The JSON of one completion request."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": spec.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,  # where it is known, chunks say how many tokens they hold
    }


async def run_bench(
    spec: BenchSpec,
    base_url: str,
    model: str,
    api_key: str | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> Report:
    """Send everything; returns when the last answer is in. Failed requests are counted by cause."""
    target = target_of(base_url, "/v1/completions", api_key)
    bodies = [request_body(spec, model, prompt) for prompt in make_prompts(spec)]
    cpu_before, started = time.process_time(), time.perf_counter()
    if spec.request_rate is None:
        replies = await _closed_loop(spec, target, bodies, on_done)
    else:
        replies = await _open_loop(spec, target, bodies, on_done)
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_before
    outcomes = [outcome_of(reply) for reply in replies]
    return analyze(spec, outcomes, wall_s, cpu_s / wall_s)


async def _closed_loop(
    spec: BenchSpec, target: Target, bodies: list[dict[str, Any]], on_done: Callable[[], None]
) -> list[RawReply | str]:
    """`concurrency` clients, each sending its next request when it has its answer."""
    replies: list[RawReply | str] = [""] * len(bodies)
    pending = iter(range(len(bodies)))

    async def client() -> None:
        for index in pending:
            replies[index] = await _attempt(target, bodies[index], spec.timeout_s)
            on_done()

    await asyncio.gather(*(client() for _ in range(spec.concurrency or 1)))
    return replies


async def _open_loop(
    spec: BenchSpec, target: Target, bodies: list[dict[str, Any]], on_done: Callable[[], None]
) -> list[RawReply | str]:
    """Requests leave on a Poisson schedule, whatever the server does."""
    assert spec.request_rate is not None
    draw = random.Random(spec.seed + 1)
    started, offset_s = time.perf_counter(), 0.0

    async def send(body: dict[str, Any]) -> RawReply | str:
        reply = await _attempt(target, body, spec.timeout_s)
        on_done()
        return reply

    tasks = []
    for body in bodies:
        await asyncio.sleep(max(0.0, started + offset_s - time.perf_counter()))
        tasks.append(asyncio.create_task(send(body)))
        offset_s += draw.expovariate(spec.request_rate)
    return await asyncio.gather(*tasks)


async def _attempt(target: Target, body: dict[str, Any], timeout_s: float) -> RawReply | str:
    """The reply, or why there is none."""
    try:
        return await post(target, body, timeout_s)
    except SplitserveError as error:
        return str(error)
    except TimeoutError:
        return f"no complete answer within {timeout_s:g} s"


def outcome_of(reply: RawReply | str) -> Outcome:
    """What the bytes of a reply meant, and when each token came."""
    if isinstance(reply, str):
        return Outcome((), reply)
    if reply.status != 200:
        text = b"".join(data for _, data in reply.parts)[:200].decode(errors="replace")
        return Outcome((), f"HTTP {reply.status}: {text}")
    parser, usage = EventParser(), None
    times: list[float] = []
    for at, data in reply.parts:
        for event in parser.feed(data):
            if event == DONE:
                return _checked(tuple(times), usage)
            body = json.loads(event)
            if "error" in body:
                return Outcome((), f"error event: {body['error'].get('message', body['error'])}")
            usage = body.get("usage") or usage
            times += [at - reply.sent_at] * _num_tokens(body)
    return Outcome((), "the stream was cut without [DONE]")


def _num_tokens(body: Mapping[str, Any]) -> int:
    choice = body["choices"][0] if body.get("choices") else {}
    if choice.get("token_ids") is not None:
        return len(choice["token_ids"])
    return int(bool(choice.get("text")))


def _checked(times: tuple[float, ...], usage: Mapping[str, Any] | None) -> Outcome:
    """Where the server counts more tokens than chunks showed, the last chunk held the others."""
    if not times:
        return Outcome((), "an answer without tokens")
    num_missing = usage["completion_tokens"] - len(times) if usage else 0
    return Outcome(times + (times[-1],) * max(num_missing, 0))


def analyze(
    spec: BenchSpec, outcomes: Sequence[Outcome], wall_s: float, client_cpu_share: float
) -> Report:
    """The report of a run. Pure."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    num_tokens = sum(len(outcome.token_times_s) for outcome in good)
    has_slo = spec.slo_ttft_s is not None or spec.slo_tpot_s is not None
    num_within = sum(within_slo(spec, outcome) for outcome in good)
    return Report(
        num_requests=len(outcomes),
        num_completed=len(good),
        wall_s=wall_s,
        output_tokens=num_tokens,
        output_tokens_per_s=num_tokens / wall_s,
        requests_per_s=len(good) / wall_s,
        ttft_ms=distribution([outcome.ttft_s for outcome in good]),
        handoff_gap_ms=distribution([gaps[0] for one in good if (gaps := one.gaps_s)]),
        tpot_ms=distribution([tpot for one in good if (tpot := one.tpot_s) is not None]),
        itl_ms=distribution([gap for outcome in good for gap in outcome.gaps_s]),
        num_within_slo=num_within if has_slo else None,
        goodput_per_s=num_within / wall_s if has_slo else None,
        client_cpu_share=client_cpu_share,
        errors=Counter(outcome.error for outcome in outcomes if outcome.error is not None),
    )


def within_slo(spec: BenchSpec, outcome: Outcome) -> bool:
    """Whether an answer met every bound given; the hand-off gap counts, as part of TPOT."""
    tpot_s = outcome.tpot_s or 0.0
    return (spec.slo_ttft_s is None or outcome.ttft_s <= spec.slo_ttft_s) and (
        spec.slo_tpot_s is None or tpot_s <= spec.slo_tpot_s
    )


def distribution(values_s: Sequence[float]) -> dict[str, float]:
    """p50, p95, p99 (nearest rank) and mean, in milliseconds; empty for no values."""
    if not values_s:
        return {}
    ordered = sorted(values_s)
    ranks = {f"p{p}": ordered[math.ceil(p / 100 * len(ordered)) - 1] for p in (50, 95, 99)}
    return {name: value * _MS for name, value in ranks.items()} | {
        "mean": sum(ordered) / len(ordered) * _MS
    }
