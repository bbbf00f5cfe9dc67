"""One measured run after its warm-up, and several of them as a document."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from splitserve.bench.outcome import Outcome
from splitserve.bench.repeats import spreads
from splitserve.bench.report import Report, analyze
from splitserve.bench.run import Run, run_load
from splitserve.bench.workloads import Spec


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to send requests, and for which model."""

    base_url: str
    model: str
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """A run, and its report."""

    run: Run
    report: Report


async def measure(
    spec: Spec,
    warm_up: Spec | None,
    endpoint: Endpoint,
    on_done: Callable[[], None] = lambda: None,
    on_warm: Callable[[], None] = lambda: None,
) -> Measured:
    """Warm up, then measure; `on_warm` is called between. What failed while warming up is among
    the report's errors."""
    where = (endpoint.base_url, endpoint.model, endpoint.api_key)
    failed_before = {}
    if warm_up is not None:
        warmed_up = analyze(await run_load(warm_up, *where))
        failed_before = {f"warm-up: {cause}": n for cause, n in warmed_up.errors.items()}
    on_warm()
    run = await run_load(spec, *where, on_done)
    report = analyze(run)
    return Measured(run, dataclasses.replace(report, errors={**failed_before, **report.errors}))


def document(workload: str, repeats: Sequence[Measured]) -> dict[str, Any]:
    """Everything measured, for a JSON file: numbers over repeats, then each repeat's requests."""
    numbers = spreads([one.report.numbers for one in repeats])
    return {
        "workload": workload,
        "seed": repeats[0].run.spec.seed,
        "spec": dataclasses.asdict(repeats[0].run.spec),
        "numbers": {name: dataclasses.asdict(value) for name, value in numbers.items()},
        "repeats": [repeat_document(one) for one in repeats],
    }


def repeat_document(measured: Measured) -> dict[str, Any]:
    """One run: its report, and every request with the time of every token, in seconds."""
    return {
        "seed": measured.run.spec.seed,
        "report": dataclasses.asdict(measured.report),
        "requests": [_request(outcome) for outcome in measured.run.outcomes],
    }


def _request(outcome: Outcome) -> dict[str, Any]:
    times = {"sent_s": outcome.sent_s, "ended_s": outcome.ended_s, "late_s": outcome.late_s}
    return {
        **({"kind": outcome.kind} if outcome.kind else {}),
        **{name: round(value, 6) for name, value in times.items()},
        "token_times_s": [round(time_s, 6) for time_s in outcome.token_times_s],
        **({"num_cached": outcome.num_cached} if outcome.num_cached else {}),
        **({"error": outcome.error} if outcome.error is not None else {}),
    }
