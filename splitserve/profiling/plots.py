"""The plots of a profile, as inline SVG. Needs matplotlib, the extra `plots`."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from splitserve.profiling.classify import phase_s
from splitserve.profiling.collected import Profile, WorkerProfile
from splitserve.profiling.entries import STAGES, Window
from splitserve.profiling.evidence import PHASES, Evidence, Phase
from splitserve.profiling.remedies import merge

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_POINTS = 400  # of one worker in one plot
MAX_BARS = 120  # of one worker over time
MAX_PANELS = 8  # workers with a plot of their own
_WIDTH_IN, _PANEL_IN = 11.0, 1.7
_LEGEND_CHARACTERS = 150  # in a row
_GREY, _INK = "#64748b", "#334155"
PREFILL_COLOURS = ("#c2410c", "#f59e0b", "#7c2d12", "#fdba74")
DECODE_COLOURS = ("#1d4ed8", "#0d9488", "#7c3aed", "#60a5fa")
PHASE_COLOURS = {
    "wait": "#e2e8f0",
    "kv_wait": "#c084fc",
    "forward": "#2563eb",
    "receive": "#facc15",
    "schedule": "#f97316",
    "prepare": "#fb7185",
    "sample": "#a3e635",
    "send": "#14b8a6",
    "other": "#94a3b8",
}
STAGE_COLOURS = {
    "queue": "#cbd5e1",
    "prefill": "#c2410c",
    "delivery": "#94a3b8",
    "grant_wait": "#e9d5ff",
    "transfer": "#9333ea",
    "decode_wait": "#c4b5fd",
    "first_step": "#60a5fa",
    "decode": "#1d4ed8",
}
_STYLE = {
    "font.size": 9.5,
    "axes.edgecolor": "#94a3b8",
    "axes.labelcolor": "#334155",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "grid.color": "#e2e8f0",
    "legend.frameon": False,
    "text.color": "#334155",
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "svg.hashsalt": "splitserve",
}
_Shown = TypeVar("_Shown")


def draw(plot: Callable[[Figure, _Shown], None], shown: _Shown, height_in: float) -> str:
    """One plot of a profile, or of something else, as an <svg> element."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: dict[Any, Any] = dict(_STYLE)
    with rc_context(style):
        figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
        plot(figure, shown)
        text = io.StringIO()
        nobody = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nobody)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def panels_height_in(profile: Profile) -> float:
    """Of plots with a panel for each worker."""
    return 0.9 + _PANEL_IN * max(1, min(MAX_PANELS, len(profile.workers)))


def roofline(figure: Figure, profile: Profile) -> None:
    """A point a window: FLOPs a byte against FLOP/s while forward passes ran. Roofs as lines."""
    from matplotlib.ticker import EngFormatter, FuncFormatter

    axes = figure.subplots()
    roofs: dict[tuple[float, float], str] = {}
    every = [1.0]
    for worker, colour in coloured(profile):
        found = (_position(window.evidence) for window in worker.windows)
        points = np.array([point for point in found if point])
        if len(points):
            across, up = thinned(points).T
            axes.scatter(across, up, s=16, color=colour, alpha=0.35, linewidths=0)
            across, up = np.exp(np.log(points).mean(axis=0))
            label = worker.facts.worker_id
            axes.scatter(across, up, s=130, color=colour, edgecolors="white", zorder=3, label=label)
            every += list(points[:, 0])
        if worker.facts.bytes_per_s and worker.facts.flops_per_s:
            roofs.setdefault((worker.facts.bytes_per_s, worker.facts.flops_per_s), colour)
    for roof, colour in roofs.items():
        every.append(roof[1] / roof[0])
        _draw_roof(axes, roof, (min(every) / 4, max(every) * 4), colour if len(roofs) > 1 else _INK)
    axes.set(xscale="log", yscale="log", xlim=(min(every) / 4, max(every) * 4))
    axes.set_xlabel("FLOPs done for each byte moved  (left: memory binds, right: compute binds)")
    axes.set_ylabel("FLOP/s while forward passes run")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(EngFormatter(unit="FLOP/s"))
    axes.grid(True, which="major")
    _legend(axes)


def occupancy(figure: Figure, profile: Profile) -> None:
    """Slots used over slots allowed: a line through windows, a dot a step."""
    axes = figure.subplots()
    for worker, colour in coloured(profile):
        steps = worker.steps[worker.steps["num_slots_allowed"] > 0]
        some = thinned(steps)
        share = some["num_slots_used"] / some["num_slots_allowed"]
        axes.scatter(some["ended_at"], 100 * share, s=5, color=colour, alpha=0.25, linewidths=0)
        means = [
            (
                w.at - w.evidence.window_s / 2,
                w.evidence.num_slots_used,
                w.evidence.num_slots_allowed,
            )
            for w in worker.windows
            if w.evidence.num_slots_allowed
        ]
        at, used, allowed = np.array(means).reshape(-1, 3).T
        axes.plot(at, 100 * used / allowed, color=colour, lw=1.8, label=worker.facts.worker_id)
    axes.set(ylim=(0, 105), ylabel="% of the batch's slots in use")
    _over_time(axes, profile)
    _legend(axes)


def breakdown(figure: Figure, profile: Profile) -> None:
    """For each worker and window, the share of its wall time in each phase."""
    workers = profile.workers[:MAX_PANELS]
    panels = figure.subplots(max(1, len(workers)), sharex=True, squeeze=False)[:, 0]
    for axes, worker in zip(panels, workers, strict=False):
        windows = _gathered(worker.windows)
        ends = np.array([window.at for window in windows])
        widths = np.array([window.evidence.window_s for window in windows])
        bottom = np.zeros(len(windows))
        for phase in _BREAKDOWN_ORDER:
            seconds = np.array([phase_s(window.evidence, phase) for window in windows])
            share = 100 * seconds / widths
            style: dict[str, Any] = {"color": PHASE_COLOURS[phase], "linewidth": 0}
            axes.bar(ends - widths, share, widths, bottom, align="edge", **style)
            axes.bar([0], [0], label=_spoken(phase), **style)  # keeps its colour without windows
            bottom += share
        axes.set(ylim=(0, 100), ylabel="% of time", title=worker.facts.worker_id)
    _over_time(panels[-1], profile)
    _legend(panels[0], ncols=len(PHASES))


def kv_use(figure: Figure, profile: Profile) -> None:
    """KV blocks in use, in percent of the worker's."""
    axes = figure.subplots()
    for worker, colour in coloured(profile):
        total = worker.facts.num_blocks_total
        label = f"{worker.facts.worker_id} (of {total})"
        if not total:
            total = max(1, int(worker.steps["num_kv_blocks_used"].max(initial=1)))
            label = f"{worker.facts.worker_id} (of its most, {total})"
        some = thinned(worker.steps)
        share = 100 * some["num_kv_blocks_used"] / total
        axes.step(some["ended_at"], share, where="post", color=colour, lw=1.5, label=label)
    axes.set(ylim=(0, 105), ylabel="% of KV blocks in use")
    _over_time(axes, profile)
    _legend(axes)


def transfers(figure: Figure, profile: Profile) -> None:
    """Above, the mean request stage by stage; below, how many were in each stage, over time."""
    mean_axes, time_axes = figure.subplots(2, height_ratios=(1, 2.4))
    bin_s = max(1.0, np.ceil(profile.observed_s / MAX_BARS))
    num_bins = max(1, int(np.ceil(profile.observed_s / bin_s)))
    sums = {name: np.zeros(num_bins) for name in STAGES}
    means = dict.fromkeys(STAGES, 0.0)
    for request in profile.requests:
        for stage in request.stages():
            means[stage.name] += stage.duration_s / len(profile.requests)
            start = request.at + stage.start_s
            _spread(sums[stage.name], start / bin_s, (start + stage.duration_s) / bin_s)
    left, bottom = 0.0, np.zeros(num_bins)
    for name in STAGES:
        label = f"{name.replace('_', ' ')} {1e3 * means[name]:.0f} ms"
        colour = STAGE_COLOURS[name]
        mean_axes.barh("mean request", means[name], left=left, color=colour, label=label)
        middles = bin_s * (np.arange(num_bins) + 0.5)
        time_axes.bar(middles, sums[name], 0.92 * bin_s, bottom, color=colour)
        left, bottom = left + means[name], bottom + sums[name]
    mean_axes.set(xlabel="seconds of the average request", yticks=[])
    mean_axes.margins(x=0)
    time_axes.set(ylabel="requests in each stage")
    _over_time(time_axes, profile)
    _legend(mean_axes)


def thinned(points: npt.NDArray[Any], most: int = MAX_POINTS) -> npt.NDArray[Any]:
    """At most so many of them, evenly, the first and the last among them."""
    if len(points) <= most:
        return points
    kept: npt.NDArray[Any] = points[np.linspace(0, len(points) - 1, most).astype(int)]
    return kept


def coloured(profile: Profile) -> list[tuple[WorkerProfile, str]]:
    """Warm colours are prefill workers', cold ones decode workers'."""
    counts: dict[bool, int] = {True: 0, False: 0}
    found = []
    for worker in profile.workers:
        prefills = worker.facts.role == "prefill"
        palette = PREFILL_COLOURS if prefills else DECODE_COLOURS
        found.append((worker, palette[counts[prefills] % len(palette)]))
        counts[prefills] += 1
    return found


_BREAKDOWN_ORDER: tuple[Phase, ...] = (
    "forward",
    *(p for p in PHASES if p not in ("forward", "wait")),
    "wait",
)


def _spoken(phase: str) -> str:
    return {"wait": "wait for requests", "kv_wait": "wait for KV"}.get(phase, phase)


def _position(evidence: Evidence) -> tuple[float, float] | None:
    if not (evidence.num_bytes and evidence.num_flops and evidence.forward_s):
        return None
    return evidence.num_flops / evidence.num_bytes, evidence.num_flops / evidence.forward_s


def _draw_roof(
    axes: Axes, roof: tuple[float, float], span: tuple[float, float], colour: str
) -> None:
    """`roof` in bytes/s and FLOP/s, `span` in FLOPs a byte. Names go above, where no dot is."""
    bytes_per_s, flops_per_s = roof
    left, ridge, right = span[0], flops_per_s / bytes_per_s, span[1]
    axes.plot([left, ridge, right], [left * bytes_per_s, flops_per_s, flops_per_s], color=colour)
    style: dict[str, Any] = {"textcoords": "offset points", "color": colour}
    middle = (left * ridge) ** 0.5
    text = f"memory roof, {bytes_per_s / 1e9:.4g} GB/s"
    axes.annotate(text, (middle, middle * bytes_per_s), (-8, 4), ha="right", **style)
    text = f"compute roof, {flops_per_s / 1e9:.4g} GFLOP/s"
    axes.annotate(text, (right, flops_per_s), (-4, 4), ha="right", **style)


def _gathered(windows: Sequence[Window]) -> list[Window]:
    """As many as there are bars for: where there are more, neighbours become one."""
    timed = [window for window in windows if window.evidence.window_s > 0]
    size = max(1, -(-len(timed) // MAX_BARS))
    groups = [timed[start : start + size] for start in range(0, len(timed), size)]
    return [Window(group[-1].at, merge([w.evidence for w in group])) for group in groups]


def _spread(sums: npt.NDArray[Any], start: float, end: float) -> None:
    """Add to each bin the part of it, in bins, that a stretch covers."""
    for place in range(max(0, int(start)), min(len(sums), int(end) + 1)):
        sums[place] += max(0.0, min(place + 1, end) - max(place, start))


def _over_time(axes: Axes, profile: Profile) -> None:
    axes.set_xlim(0, max(1.0, profile.observed_s))
    axes.set_xlabel("seconds since the profile began")
    axes.grid(True, axis="y")
    axes.set_axisbelow(True)


def _legend(axes: Axes, ncols: int = 4) -> None:
    """Above the axes, in rows: names may be long."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        axes.annotate("nothing to show", (0.5, 0.93), xycoords="axes fraction", ha="center")
        return
    longest = max(len(str(label)) for label in labels)
    ncols = max(1, min(ncols, _LEGEND_CHARACTERS // (longest + 5)))
    place: dict[str, Any] = {"loc": "outside upper left", "ncols": ncols}
    axes.figure.legend(handles=handles, columnspacing=1.4, handletextpad=0.5, **place)
