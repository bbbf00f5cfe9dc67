"""Several runs of one workload: medians, how far they spread, and ratios of paired runs. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Numbers = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Spread:
    """A number over repeats."""

    median: float
    low: float
    high: float
    num_values: int

    def __str__(self) -> str:
        """The median, and where there were several values the least and the greatest."""
        if self.num_values == 1:
            return _shown(self.median)
        return f"{_shown(self.median)} ({_shown(self.low)}..{_shown(self.high)})"


def _shown(value: float) -> str:
    """Two decimals below 10, one below 100, none above: more would be noise."""
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f}"


def spread_of(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    return Spread(statistics.median(values), min(values), max(values), len(values))


def spreads(runs: Sequence[Numbers]) -> dict[str, Spread]:
    """Of each number, over the runs that have it."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: spread_of([run[name] for run in runs if name in run]) for name in names}


def paired_ratios(
    firsts: Sequence[Numbers | None], others: Sequence[Numbers | None]
) -> dict[str, Spread]:
    """Of each number: other / first, repeat by repeat. A repeat counts where both have the number
    and the first's is not 0; None is a run that did not come about."""
    pairs = [(a, b) for a, b in zip(firsts, others, strict=True) if a is not None and b is not None]
    ratios = [{name: b[name] / a[name] for name in a if name in b and a[name]} for a, b in pairs]
    return spreads(ratios)
