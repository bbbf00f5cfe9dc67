"""Distributions and throughput of runs, as one SVG. Needs matplotlib, the extra `plots`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from splitserve.bench.run import Run
from splitserve.profiling.plots import DECODE_COLOURS, PREFILL_COLOURS, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HEIGHT_IN = 4.2
_COLOURS = tuple(
    colour for pair in zip(DECODE_COLOURS, PREFILL_COLOURS, strict=True) for colour in pair
)
_MAX_BINS = 60
_LEAST_MS = 0.1  # between tokens; shorter ones came together
Series = Mapping[str, Sequence[Run]]  # runs by what they are called in the legend


def bench_plot(series: Series) -> str:
    """TTFT and ITL as cumulated shares, and output tokens/s over time; an SVG document."""
    return draw(_panels, series, _HEIGHT_IN)


def _panels(figure: Figure, series: Series) -> None:
    from matplotlib.ticker import FuncFormatter

    ttft, itl, rate = figure.subplots(1, 3)
    for place, (name, runs) in enumerate(series.items()):
        colour = _COLOURS[place % len(_COLOURS)]
        _cumulated(ttft, [ms for run in runs for ms in ttfts_ms(run)], colour, name)
        _cumulated(itl, [max(ms, _LEAST_MS) for run in runs for ms in itls_ms(run)], colour, name)
        for run in runs:
            at_s, tokens_per_s = throughput(run)
            rate.step(at_s, tokens_per_s, where="mid", color=colour, lw=1.2, alpha=0.6)
    ttft.set(xlabel="TTFT, ms", ylabel="% of requests")
    itl.set(xlabel="time between tokens, ms", ylabel="% of gaps", xscale="log")
    rate.set(xlabel="seconds since the run began", ylabel="output tokens/s")
    itl.set_xlim(left=_LEAST_MS)
    itl.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    rate.set_ylim(bottom=0)
    for axes in (ttft, itl, rate):
        axes.grid(True)
        axes.set_axisbelow(True)
    handles, labels = ttft.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper left", ncols=4)


def _cumulated(axes: Axes, values: Sequence[float], colour: str, name: str) -> None:
    if values:
        shares = np.linspace(0, 100, len(values) + 1)
        ordered = np.sort([min(values), *values])
        axes.step(ordered, shares, where="post", color=colour, label=name)
    axes.set_ylim(0, 102)


def ttfts_ms(run: Run) -> list[float]:
    """Of a mixed load, those of the long prompts: they are what it asks about."""
    good = [outcome for outcome in run.outcomes if outcome.error is None]
    return [1000 * outcome.ttft_s for outcome in good if outcome.kind != "stream"]


def itls_ms(run: Run) -> list[float]:
    """Of a mixed load, those of the streams, all stretches together."""
    good = [outcome for outcome in run.outcomes if outcome.error is None]
    gaps = (gap for outcome in good if outcome.kind != "long" for gap in outcome.gaps_s)
    return [1000 * gap for gap in gaps]


def throughput(run: Run) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The middles of equal stretches of a run, seconds, and output tokens/s in each."""
    times = [outcome.sent_s + time for outcome in run.outcomes for time in outcome.token_times_s]
    num_bins = int(np.clip(run.wall_s, 1, _MAX_BINS))
    counts, edges = np.histogram(times, bins=num_bins, range=(0, run.wall_s))
    return (edges[:-1] + edges[1:]) / 2, counts * num_bins / run.wall_s
