"""A profile for the terminal: a row a worker, and one line for the cluster."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from splitserve.profiling.collected import Profile
from splitserve.profiling.remedies import Remedy
from splitserve.profiling.verdict import (
    ClusterVerdict,
    WorkerVerdict,
    presence_text,
    remedy_text,
    shares_text,
)

NUM_REMEDIES = 3  # shown of each worker
_STYLES = {"idle": "dim", "batching": "cyan", "transfer": "magenta", "host": "yellow"}


def profile_table(
    profile: Profile, workers: Sequence[WorkerVerdict], cluster: ClusterVerdict
) -> RenderableType:
    """Everything there is to say in a terminal. Names from the cluster are no markup here."""
    return Group(Text(title(profile)), _table(workers), *_closing(profile, cluster))


def title(profile: Profile) -> str:
    num_steps = sum(len(worker.steps) for worker in profile.workers)
    return (
        f"{profile.model}: {profile.observed_s:.0f} s, {len(profile.workers)} workers,"
        f" {num_steps} steps, {len(profile.requests)} requests finished"
    )


def notes(profile: Profile) -> list[str]:
    """What a reader must know before trusting the numbers."""
    said = []
    if not profile.is_whole:
        said.append(f"cut short: {profile.observed_s:.1f} of {profile.asked_s:g} s")
    if profile.num_dropped:
        said.append(f"left out for lack of room: {profile.num_dropped} entries")
    if profile.num_unreadable:
        said.append(f"unreadable lines: {profile.num_unreadable}")
    return said


def _table(workers: Sequence[WorkerVerdict]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_lines=True)
    longest_id = max((len(worker.facts.worker_id) for worker in workers), default=0)
    table.add_column("worker", no_wrap=True, min_width=longest_id)
    table.add_column("evidence", ratio=2, overflow="fold")
    table.add_column("what helps, best first", ratio=3, overflow="fold")
    for worker in workers:
        table.add_row(_identity(worker), _evidence(worker), _remedies(worker.remedies))
    return table


def _identity(worker: WorkerVerdict) -> Text:
    return Text.assemble(
        worker.facts.worker_id,
        "\n",
        (worker.bottleneck, f"bold {_STYLES.get(worker.bottleneck, 'red')}"),
        f"\nin {worker.num_said_so} of {worker.num_windows} windows",
    )


def _evidence(worker: WorkerVerdict) -> Text:
    if not worker.num_windows:
        return Text(worker.reason)
    lines = (worker.reason, presence_text(worker.evidence), shares_text(worker.evidence))
    return Text("\n".join(lines))


def _remedies(remedies: Sequence[Remedy]) -> Text:
    text = Text()
    for place, remedy in enumerate(remedies[:NUM_REMEDIES], start=1):
        text.append(f"{place}. {remedy_text(remedy)}\n")
        text.append(f"   {remedy.arithmetic}\n", style="dim")
    text.rstrip()
    return text


def _closing(profile: Profile, cluster: ClusterVerdict) -> list[Text]:
    line = Text.assemble((f"{cluster.headline}.", "bold"), f" {cluster.why} {cluster.advice}")
    return [line, *(Text(f"note: {note}", style="yellow") for note in notes(profile))]
