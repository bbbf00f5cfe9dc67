"""`splitserve bench`: load any OpenAI-compatible server, and show what its users felt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from splitserve.commands.options import API_KEY, BASE_URL
from splitserve.commands.output_files import check_output_files, write_output
from splitserve.errors import ConfigError

if TYPE_CHECKING:
    from splitserve.bench import Spec
    from splitserve.bench.measure import Endpoint, Measured

_PIPE_WIDTH = 160  # of a table that no terminal bounds
_WORKLOAD_HELP = (
    "w1: 32 requests, 256 tokens in, 64 out, 16 at a time. w2: the same 512-token prefix + 32 own "
    "tokens, 32 out. w3: for 60 s 4 streams of 400 tokens, with a 2,000-token prompt every 8 s, "
    "after 15 s without. single: one client, 8 requests as in w1. The options below change parts."
)
_WARM_UP_HELP = (
    "Requests before each measured run. Unset: as many as run at once. Of w3 any number but 0 is "
    "one round."
)


class Workload(StrEnum):
    """As `--workload` takes it."""

    w1 = "w1"
    w2 = "w2"
    w3 = "w3"
    single = "single"


def bench(  # noqa: PLR0913 (a command's options)
    context: typer.Context,
    base_url: str = BASE_URL,
    api_key: str | None = API_KEY,
    model: str | None = typer.Option(None, help="Unset: the first the server lists."),
    workload: Workload = typer.Option(Workload.w1, help=_WORKLOAD_HELP),
    num_requests: int | None = typer.Option(None, min=1),
    prompt_tokens: int | None = typer.Option(None, min=1),
    output_tokens: int | None = typer.Option(None, min=1),
    concurrency: int | None = typer.Option(None, min=1, help="Clients at a time."),
    request_rate: float | None = typer.Option(
        None, min=1e-6, help="Requests/s, Poisson, whatever the server does."
    ),
    shared_prefix_tokens: int | None = typer.Option(None, min=0, help="Of the prompt, of all."),
    duration_s: float | None = typer.Option(None, min=0.1, help="Of w3, with long prompts."),
    slo_ttft_s: float | None = typer.Option(None, min=0, help="Bound on the first token."),
    slo_tpot_s: float | None = typer.Option(None, min=0, help="Bound on time per token."),
    vocab_size: int | None = typer.Option(
        None, min=1001, help="Token ids are drawn below this. Default: 32000."
    ),
    seed: int | None = typer.Option(
        None, help="Of the first repeat; each has one more than the last. Unset: a fresh one."
    ),
    timeout_s: float = typer.Option(600.0, min=0.1, help="Of one request."),
    warm_up: int | None = typer.Option(None, min=0, help=_WARM_UP_HELP),
    repeats: int = typer.Option(1, min=1, help="The table has medians, and least..greatest."),
    plot: Path | None = typer.Option(
        None, help="Write an SVG of TTFT, ITL and throughput there. Needs the extra `plots`."
    ),
    json_file: Path | None = typer.Option(None, "--json", help="Write all numbers there."),
) -> None:
    """Measure a server under load."""
    from splitserve.bench.measure import Endpoint
    from splitserve.bench.workloads import SPEC_FIELDS, fresh_seed, workload_of
    from splitserve.client import Client

    first_seed = fresh_seed() if seed is None else seed
    given = {name: context.params[name] for name in SPEC_FIELDS if name in context.params}
    spec = workload_of(workload.value, given)
    _check_files(plot, json_file)
    with Client(base_url, api_key, model=model) as client:
        endpoint = Endpoint(client.base_url, client.model, api_key)
    typer.echo(f"seed {first_seed} (--seed {first_seed} sends the same prompts again)")
    specs = [replace(spec, seed=first_seed + repeat) for repeat in range(repeats)]
    done = [_run(one, warm_up, endpoint, repeat) for repeat, one in enumerate(specs)]
    _show(done)
    _write(workload.value, done, plot, json_file)
    if any(one.report.num_failed for one in done):
        raise typer.Exit(1)


def _check_files(plot: Path | None, json_file: Path | None) -> None:
    """Before a long run, not after it. Raises ConfigError."""
    from splitserve.profiling.report import require_plots

    check_output_files({"the numbers": json_file, "the plot": plot})
    if plot is not None:
        if plot.suffix != ".svg":
            raise ConfigError(f"--plot {plot}: it is an SVG, so its name must end with .svg")
        require_plots("--plot")


def _run(spec: Spec, num_warm_up: int | None, endpoint: Endpoint, repeat: int) -> Measured:
    from splitserve.bench.measure import measure
    from splitserve.bench.workloads import BenchSpec, warm_up_of

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, refresh_per_second=2, transient=True) as progress:
        total = spec.num_requests if isinstance(spec, BenchSpec) else None
        task = progress.add_task(f"repeat {repeat + 1}: requests", total=total)
        warm_up = warm_up_of(spec, num_warm_up)
        return asyncio.run(measure(spec, warm_up, endpoint, lambda: progress.advance(task)))


def _show(done: Sequence[Measured]) -> None:
    from splitserve.bench.table import headlines, summary_table

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _PIPE_WIDTH)
    reports = [one.report for one in done]
    console.print("\n".join(headlines(reports)), markup=False, soft_wrap=True)
    console.print(summary_table(reports))


def _write(
    workload: str, done: Sequence[Measured], plot: Path | None, json_file: Path | None
) -> None:
    from splitserve.bench.measure import document
    from splitserve.bench.plots import bench_plot

    if json_file is not None:
        text = json.dumps(document(workload, done), indent=1)
        write_output(json_file, text + "\n")
    if plot is not None:
        write_output(plot, bench_plot({workload: [one.run for one in done]}))
