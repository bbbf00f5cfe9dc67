"""The numbers of a run. Pure; times are in milliseconds from here on.

A number has a name: `<what>_<statistic>_ms` for those of a distribution, as in `ttft_p50_ms`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from splitserve.bench.outcome import Outcome
from splitserve.bench.run import Run
from splitserve.bench.workloads import BenchSpec, MixedSpec, Spec

STATISTICS = ("p50", "p95", "p99", "mean", "max")
_MS = 1000.0
_LATE_MS = 10.0  # for the 99th percentile of requests: more is no longer the schedule asked for
_BUSY_SHARE = 0.8  # of a core: beyond it the client itself delays what it measures


@dataclass(frozen=True, slots=True)
class Report:
    """The numbers of a run by name, how its requests failed, and what makes numbers doubtful."""

    num_requests: int
    num_completed: int
    numbers: Mapping[str, float]
    errors: Mapping[str, int]  # how often, by cause
    warnings: tuple[str, ...] = ()

    @property
    def num_failed(self) -> int:
        return sum(self.errors.values())


@dataclass(frozen=True, slots=True)
class _Gap:
    """Between two tokens of one answer, seconds since the run began."""

    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s


def analyze(run: Run) -> Report:
    """The report of a run. Failed requests are counted by cause and have no other part in it."""
    good = [outcome for outcome in run.outcomes if outcome.error is None]
    num_tokens = sum(len(outcome.token_times_s) for outcome in good)
    numbers = {
        "output_tokens_per_s": num_tokens / run.wall_s,
        "requests_per_s": len(good) / run.wall_s,
        "output_tokens": float(num_tokens),
        "wall_s": run.wall_s,
        "client_cpu_share": run.client_cpu_share,
    }
    if isinstance(run.spec, MixedSpec):
        numbers |= _mixed_numbers(run.spec, run.outcomes, good)
    else:
        numbers |= _request_numbers("", good)
        numbers |= _slo_numbers(run.spec, good, run.wall_s)
    if isinstance(run.spec, MixedSpec) or run.spec.request_rate is not None:
        numbers |= _named("late", [outcome.late_s for outcome in run.outcomes])
    return Report(
        num_requests=len(run.outcomes),
        num_completed=len(good),
        numbers=numbers,
        errors=Counter(_cause(one) for one in run.outcomes if one.error is not None),
        warnings=tuple(_warnings(run.spec, numbers, good)),
    )


def _cause(outcome: Outcome) -> str:
    return f"{outcome.kind}: {outcome.error}" if outcome.kind else str(outcome.error)


def _request_numbers(prefix: str, good: Sequence[Outcome]) -> dict[str, float]:
    return (
        _named(f"{prefix}ttft", [one.ttft_s for one in good])
        | _named(f"{prefix}handoff_gap", [gaps[0] for one in good if (gaps := one.gaps_s)])
        | _named(f"{prefix}tpot", [tpot for one in good if (tpot := one.tpot_s) is not None])
        | _named(f"{prefix}itl", [gap for one in good for gap in one.gaps_s])
    )


def _slo_numbers(spec: BenchSpec, good: Sequence[Outcome], wall_s: float) -> dict[str, float]:
    if spec.slo_ttft_s is None and spec.slo_tpot_s is None:
        return {}
    num_within = sum(within_slo(spec, outcome) for outcome in good)
    return {"num_within_slo": float(num_within), "goodput_per_s": num_within / wall_s}


def within_slo(spec: BenchSpec, outcome: Outcome) -> bool:
    """Whether an answer met every bound given; the hand-off gap counts, as part of TPOT."""
    tpot_s = outcome.tpot_s or 0.0
    return (spec.slo_ttft_s is None or outcome.ttft_s <= spec.slo_ttft_s) and (
        spec.slo_tpot_s is None or tpot_s <= spec.slo_tpot_s
    )


def _mixed_numbers(
    spec: MixedSpec, outcomes: Sequence[Outcome], good: Sequence[Outcome]
) -> dict[str, float]:
    """ITL of the streams in three stretches, which have every gap among them in exactly one.

    Undisturbed: over before the first long prompt was sent. After: begun when the time was up and
    every long prompt was answered. All between is what the load is about.
    """
    streams = [outcome for outcome in good if outcome.kind == "stream"]
    long_prompts = [outcome for outcome in outcomes if outcome.kind == "long"]
    first_s = min((one.sent_s for one in long_prompts), default=math.inf)
    ends_s = spec.undisturbed_s + spec.duration_s
    over_s = max([ends_s, *(one.ended_s for one in long_prompts)])

    def among(gaps: Iterable[_Gap], chosen: Callable[[_Gap], bool]) -> list[float]:
        return [gap.length_s for gap in gaps if chosen(gap)]

    gaps = [gap for one in streams for gap in _gaps_of(one)]
    undisturbed = _named("undisturbed_itl", among(gaps, lambda gap: gap.end_s <= first_s))
    after = among(gaps, lambda gap: gap.end_s > first_s and gap.begin_s >= over_s)
    between = among(gaps, lambda gap: gap.end_s > first_s and gap.begin_s < over_s)
    itl = _named("stream_itl", between)
    numbers = itl | undisturbed | _named("after_itl", after)
    numbers |= _named("long_ttft", [one.ttft_s for one in good if one.kind == "long"])
    numbers |= _named("stream_ttft", [one.ttft_s for one in streams])
    numbers |= {"num_streams": float(len(streams)), "num_long": float(len(good) - len(streams))}
    if first_s < over_s:
        at_s = (one.sent_s + time_s for one in streams for time_s in one.token_times_s)
        num_tokens = sum(first_s <= time_s < over_s for time_s in at_s)
        numbers["stream_tokens_per_s"] = num_tokens / (over_s - first_s)
    if undisturbed and itl:
        ratio = itl["stream_itl_p50_ms"] / undisturbed["undisturbed_itl_p50_ms"]
        numbers["itl_p50_over_undisturbed"] = ratio
    return numbers


def _gaps_of(outcome: Outcome) -> Iterable[_Gap]:
    """Empty for an answer of one token."""
    for begin_s, end_s in pairwise(outcome.token_times_s):
        yield _Gap(outcome.sent_s + begin_s, outcome.sent_s + end_s)


def _warnings(spec: Spec, numbers: Mapping[str, float], good: Sequence[Outcome]) -> Iterable[str]:
    shared = spec.shared_prefix_tokens if isinstance(spec, BenchSpec) else 0
    if num_known := sum(max(0, one.num_cached - shared) for one in good):
        yield (
            f"the server had {num_known} tokens of the prompts in a cache (cached_tokens of its "
            "usage), beyond any prefix this load shares: TTFT is too good; was this --seed sent "
            "to it before?"
        )
    if numbers.get("late_p99_ms", 0.0) > _LATE_MS:
        yield (
            f"this client could not keep up: it sent requests late, p99 "
            f"{numbers['late_p99_ms']:.0f} ms, worst {numbers['late_max_ms']:.0f} ms"
        )
    if numbers["client_cpu_share"] > _BUSY_SHARE:
        share = f"{numbers['client_cpu_share']:.0%}"
        yield f"this client was busy for {share} of the time: some of the delays may be its own"
    if num_hidden := sum(outcome.num_hidden for outcome in good):
        yield (
            f"{num_hidden} of {numbers['output_tokens']:.0f} tokens came in no chunk of their own "
            "(by the server's usage) and are counted with the last chunk: ITL is too good"
        )


def _named(name: str, values_s: Sequence[float]) -> dict[str, float]:
    return {f"{name}_{what}_ms": value for what, value in distribution(values_s).items()}


def distribution(values_s: Sequence[float]) -> dict[str, float]:
    """p50, p95, p99 (nearest rank), mean and max, in milliseconds; empty for no values."""
    if not values_s:
        return {}
    ordered = sorted(values_s)
    ranks = {f"p{p}": ordered[math.ceil(p / 100 * len(ordered)) - 1] for p in (50, 95, 99)}
    ranks |= {"mean": sum(ordered) / len(ordered), "max": ordered[-1]}
    return {name: value * _MS for name, value in ranks.items()}
