"""Numbers for people: their names in words, and a table of one server's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.table import Table

from splitserve.bench.repeats import spreads
from splitserve.bench.report import STATISTICS, Report

# What a distribution's numbers begin with, and what that is called.
DISTRIBUTIONS = {
    "ttft": "TTFT",
    "handoff_gap": "hand-off gap (token 0 to 1)",
    "tpot": "TPOT",
    "itl": "ITL",
    "long_ttft": "TTFT of long prompts",
    "stream_ttft": "TTFT of streams",
    "stream_itl": "ITL of streams",
    "undisturbed_itl": "ITL of streams, undisturbed",
    "after_itl": "ITL of streams, after it all",
    "late": "sent late by this client",
}
SCALARS = {
    "output_tokens_per_s": "output tokens/s",
    "requests_per_s": "requests/s",
    "goodput_per_s": "requests/s within the SLO",
    "stream_tokens_per_s": "tokens/s of streams beside long prompts",
    "itl_p50_over_undisturbed": "ITL p50 of streams over undisturbed",
}


def label(name: str) -> str:
    """A number's name in words, with its unit."""
    if name in SCALARS:
        return SCALARS[name]
    what, statistic = name.removesuffix("_ms").rsplit("_", 1)
    return f"{DISTRIBUTIONS[what]} {statistic}, ms"


def summary_table(reports: Sequence[Report]) -> Table:
    """A server's numbers, in milliseconds; of several repeats medians, and least..greatest."""
    numbers = spreads([report.numbers for report in reports])
    table = Table("ms", *STATISTICS)
    for what, words in DISTRIBUTIONS.items():
        cells = [numbers.get(f"{what}_{statistic}_ms") for statistic in STATISTICS]
        if any(cells):
            table.add_row(words, *(str(cell) if cell else "-" for cell in cells))
    return table


def headlines(reports: Sequence[Report]) -> Iterable[str]:
    """What is said above the table, failures and doubts included."""
    numbers = spreads([report.numbers for report in reports])
    if len(reports) > 1:
        num_failed = sum(bool(report.errors) for report in reports)
        failed = f", {num_failed} of them with failed requests" if num_failed else ""
        yield f"medians of {len(reports)} repeats (least..greatest){failed}"
    shown = [(numbers[name], words) for name, words in SCALARS.items() if name in numbers]
    yield ", ".join(f"{number} {words}" for number, words in shown)
    num_completed = sum(report.num_completed for report in reports)
    num_requests = sum(report.num_requests for report in reports)
    wall_s = sum(report.numbers["wall_s"] for report in reports)
    share = numbers["client_cpu_share"].high
    yield (
        f"{num_completed} of {num_requests} completed in {wall_s:.2f} s; "
        f"this client used {share:.1%} of a core"
    )
    yield from doubts(reports)


def doubts(reports: Sequence[Report]) -> list[str]:
    """A line for each cause of failure, and for each reason to doubt a number."""
    causes: Counter[str] = Counter()
    for report in reports:
        causes.update(report.errors)
    lines = [f"ERROR: {count} x {cause}" for cause, count in causes.items()]
    return lines + [f"WARNING: {text}" for report in reports for text in report.warnings]
