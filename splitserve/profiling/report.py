"""A profile as one HTML file that loads nothing. Needs the extra `plots`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from splitserve.config import ROLES
from splitserve.errors import ConfigError
from splitserve.profiling import plots
from splitserve.profiling.classify import nearer_roof, percent
from splitserve.profiling.collected import Profile
from splitserve.profiling.table import notes, title
from splitserve.profiling.verdict import (
    MEANINGS,
    ClusterVerdict,
    WorkerVerdict,
    remedy_text,
    saturation,
    shares_text,
    utilisation,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TILES = {
    "time to first token (median)": "ttft_s",
    "of it, queue": "queue_s",
    "of it, prefill": "prefill_s",
    "gap after the first token": "handoff_gap_s",
    "of it, transfer": "transfer_s",
    "whole request": "e2e_s",
}


@dataclass(frozen=True, slots=True)
class _Plot:
    """One plot of the report, and how to read it."""

    name: str
    title: str
    caption: str
    draw: Callable[[Figure, Profile], None]
    height_in: float = 0.0  # 0: a panel a worker


_PLOTS = (
    _Plot(
        "roofline",
        "Roofline: how near to what the machine can do",
        "A faint dot is a window (a second or more), a large one the worker's mean. The roof above"
        " a dot is what binds it; the distance to the roof is what better kernels could win, the"
        " way to the right what wider batches could.",
        plots.roofline,
        4.4,
    ),
    _Plot(
        "breakdown",
        "Where each second went",
        "One bar a window. Blue is the model; pale is waiting for requests; all else is the loop"
        " around the model, or a wait for KV.",
        plots.breakdown,
    ),
    _Plot(
        "occupancy",
        "How full the batches were",
        "Slots are sequences on decode workers and tokens on prefill workers. A line far below"
        " 100 % on a busy worker: there is room for more. Whether more is cheap, the roofline says:"
        " on its slope nearly free, near its corner not.",
        plots.occupancy,
        3.2,
    ),
    _Plot(
        "kv",
        "KV blocks in use",
        "A decode worker near 100 % can't take more sequences, however empty its batch is.",
        plots.kv_use,
        3.0,
    ),
    _Plot(
        "transfers",
        "Transfers against compute, as requests see it",
        "Above, the average request from its arrival to its end. Below, how many requests were in"
        " each stage, second by second (of those that finished in time, so the last ones are"
        " missing). Much grey: they queue for prefill. Much purple: the hand-off costs more than it"
        " should.",
        plots.transfers,
        4.6,
    ),
)


def require_plots(what: str = "the HTML report") -> None:
    """Raises ConfigError, naming what needs it, without the extra `plots`."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{what} needs {error.name}; install it: pip install 'splitserve[plots]'"
        ) from error


def html_report(
    profile: Profile,
    workers: Sequence[WorkerVerdict],
    cluster: ClusterVerdict,
    made_at: str = "",
) -> str:
    """The whole document. Raises ConfigError without the extra `plots`.

    The template escapes everything that is put in, but for the plots, which are ours.
    """
    require_plots()
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    source = files("splitserve.profiling").joinpath("report.html").read_text("utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(source)
    return template.render(
        profile=profile,
        title=title(profile),
        made_at=made_at,
        notes=notes(profile),
        cluster=cluster,
        tiles=_tiles(profile),
        pools=_pools(workers),
        plots=[_drawn(plot, profile, Markup) for plot in _PLOTS],
        meanings=MEANINGS,
        nearer_roof=nearer_roof,
        percent=percent,
        remedy_text=remedy_text,
        saturation=saturation,
        shares_text=shares_text,
        utilisation=utilisation,
        width=lambda part: f"{100 * min(1.0, max(0.0, part)):.1f}%",
    )


def _drawn(plot: _Plot, profile: Profile, safe: Callable[[str], Any]) -> dict[str, Any]:
    height_in = plot.height_in or plots.panels_height_in(profile)
    svg = safe(plots.draw(plot.draw, profile, height_in))
    return {"name": plot.name, "title": plot.title, "caption": plot.caption, "svg": svg}


def _pools(workers: Sequence[WorkerVerdict]) -> list[list[WorkerVerdict]]:
    """Prefill left, everybody else right."""
    prefill = [worker for worker in workers if worker.facts.role == ROLES[0]]
    return [prefill, [worker for worker in workers if worker.facts.role != ROLES[0]]]


def _tiles(profile: Profile) -> list[tuple[str, str]]:
    """Medians over requests, in milliseconds."""
    tiles = []
    for name, key in _TILES.items():
        values = [r.seconds[key] for r in profile.requests if key in r.seconds]
        if values:
            tiles.append((name, f"{1e3 * float(np.median(values)):.0f} ms"))
    return [("finished (medians of these)", str(len(profile.requests))), *tiles] if tiles else []
