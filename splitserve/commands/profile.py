"""`splitserve profile`: watch a running cluster, and say what binds it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from splitserve.commands.errors import show_error
from splitserve.commands.options import API_KEY, BASE_URL
from splitserve.commands.output_files import check_output_files
from splitserve.errors import ConfigError, SplitserveError

if TYPE_CHECKING:
    from splitserve.calls import Address
    from splitserve.profiling.collected import Collector

_PIPE_WIDTH = 160  # of a table that no terminal bounds


def profile(
    base_url: str = BASE_URL,
    api_key: str | None = API_KEY,
    duration: float = typer.Option(30.0, min=1, max=600, help="Seconds to watch."),
    html: Path | None = typer.Option(None, help="Write a report with plots there."),
    trace: Path | None = typer.Option(None, help="Write a trace for ui.perfetto.dev there."),
    kernels: int = typer.Option(
        0, min=0, max=20, help="Of so many steps --trace shows the operations."
    ),
) -> None:
    """Show what binds each worker of a running cluster, and what to do first.

    Ctrl-C stops early and reports what came until then.
    """
    from splitserve.calls import address_of
    from splitserve.profiling.collected import Collector
    from splitserve.profiling.report import require_plots

    check_output_files({"the report": html, "the trace": trace})
    if html is not None:
        require_plots()
    if kernels and trace is None:
        raise ConfigError("--kernels is shown in a trace only: add --trace FILE")
    collector = Collector()
    failure = _collect(collector, address_of(base_url, api_key), duration, kernels)
    if failure is not None and not collector.has_started:
        raise failure
    is_written = _report(collector, html, trace)
    if failure is not None:
        show_error(failure)
    if failure is not None or not is_written:
        raise typer.Exit(1)


@contextmanager
def _remembered_interrupts() -> Iterator[list[int]]:
    """Fills when SIGINT comes: where it strikes while an object is deleted, Python drops its
    KeyboardInterrupt."""
    seen: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _collect(
    collector: Collector, address: Address, duration_s: float, num_kernel_steps: int
) -> SplitserveError | None:
    """Read until the end, Ctrl-C, or what went wrong, which is the answer."""
    from splitserve.errors import StreamBrokenError
    from splitserve.profiling.fetch import profile_stream

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    try:
        with (
            _remembered_interrupts() as interrupted,
            bar as progress,
            profile_stream(address, duration_s, num_kernel_steps) as chunks,
        ):
            task = progress.add_task("watching", total=duration_s)
            for chunk in chunks:
                collector.feed(chunk)
                if interrupted:
                    raise KeyboardInterrupt
                text = f"{collector.num_steps} steps, {collector.num_requests} requests"
                progress.update(task, completed=collector.elapsed_s, description=text)
    except SplitserveError as error:
        return error
    except KeyboardInterrupt:
        return None if collector.has_started else StreamBrokenError("stopped before it began")
    return None if collector.is_whole else StreamBrokenError("the profile ended too early")


def _report(collector: Collector, html: Path | None, trace: Path | None) -> bool:
    """Print the table and write the files. Whether all of it could be."""
    from splitserve.profiling.report import html_report
    from splitserve.profiling.table import profile_table
    from splitserve.profiling.trace import write_trace
    from splitserve.profiling.verdict import cluster_verdict, worker_verdicts

    collected = collector.profile()
    workers = worker_verdicts(collected)
    cluster = cluster_verdict(workers)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _PIPE_WIDTH)
    console.print(profile_table(collected, workers, cluster))
    is_written = True
    if html is not None:
        made_at = time.strftime("%Y-%m-%d %H:%M")
        text = html_report(collected, workers, cluster, made_at)
        is_written &= _write(html, lambda file: file.write(text), "report: {}", console)
    if trace is not None:
        said = "trace: {}, for ui.perfetto.dev"
        is_written &= _write(trace, partial(write_trace, collected), said, console)
    return is_written


def _write(path: Path, write: Callable[[TextIO], object], said: str, console: Console) -> bool:
    """What can't be written is said, and harms nothing else."""
    try:
        with path.open("w", encoding="utf-8") as file:
            write(file)
    except OSError as error:
        show_error(ConfigError(f"can't write {path}: {error.strerror}"))
        return False
    console.print(said.format(path), markup=False, soft_wrap=True)
    return True
