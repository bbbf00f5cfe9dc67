"""`splitserve bench`: load any OpenAI-compatible server, and show what its users felt."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from splitserve.commands.options import API_KEY, BASE_URL
from splitserve.errors import ConfigError

if TYPE_CHECKING:
    from splitserve.bench import BenchSpec, Report


def bench(  # noqa: PLR0913 (a command's options)
    base_url: str = BASE_URL,
    api_key: str | None = API_KEY,
    model: str | None = typer.Option(None, help="Unset: the first the server lists."),
    num_requests: int = typer.Option(32, min=1),
    prompt_tokens: int = typer.Option(256, min=1),
    output_tokens: int = typer.Option(64, min=1),
    concurrency: int | None = typer.Option(None, min=1, help="Clients at a time. Default: 16."),
    request_rate: float | None = typer.Option(None, min=1e-6, help="Requests/s, Poisson."),
    shared_prefix_tokens: int = typer.Option(0, min=0, help="Of the prompt, shared by all."),
    slo_ttft_s: float | None = typer.Option(None, min=0, help="Bound on the first token."),
    slo_tpot_s: float | None = typer.Option(None, min=0, help="Bound on time per token."),
    vocab_size: int = typer.Option(32000, min=1001, help="Token ids are drawn below this."),
    seed: int = typer.Option(0),
    timeout_s: float = typer.Option(600.0, min=0.1, help="Of one request."),
    json_file: Path | None = typer.Option(None, "--json", help="Write the report there too."),
) -> None:
    """Measure a server under load."""
    from splitserve.bench import BenchSpec
    from splitserve.client import Client

    if concurrency is not None and request_rate is not None:
        raise ConfigError("give --concurrency or --request-rate, not both")
    if shared_prefix_tokens > prompt_tokens:
        raise ConfigError(
            f"--shared-prefix-tokens {shared_prefix_tokens} is above "
            f"--prompt-tokens {prompt_tokens}"
        )
    spec = BenchSpec(
        num_requests=num_requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        concurrency=concurrency or (16 if request_rate is None else None),
        request_rate=request_rate,
        shared_prefix_tokens=shared_prefix_tokens,
        slo_ttft_s=slo_ttft_s,
        slo_tpot_s=slo_tpot_s,
        vocab_size=vocab_size,
        seed=seed,
        timeout_s=timeout_s,
    )
    with Client(base_url, api_key, model=model) as client:
        report = _run(spec, client.base_url, client.model, api_key)
    Console().print(report_table(report))
    if json_file is not None:
        document = {"spec": dataclasses.asdict(spec), "report": dataclasses.asdict(report)}
        json_file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if report.num_completed < report.num_requests:
        raise typer.Exit(1)


def _run(spec: BenchSpec, base_url: str, model: str, api_key: str | None) -> Report:
    from splitserve.bench import run_bench

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, refresh_per_second=2, transient=True) as progress:
        task = progress.add_task("requests", total=spec.num_requests)
        return asyncio.run(
            run_bench(spec, base_url, model, api_key, lambda: progress.advance(task))
        )


def report_table(report: Report) -> Table:
    """The report as a table; times in milliseconds."""
    table = Table("ms", "p50", "p95", "p99", "mean", title=_headline(report))
    rows = {
        "TTFT": report.ttft_ms,
        "hand-off gap (token 0 to 1)": report.handoff_gap_ms,
        "TPOT": report.tpot_ms,
        "ITL": report.itl_ms,
    }
    for name, values in rows.items():
        table.add_row(
            name, *(f"{values[p]:.1f}" if values else "-" for p in ("p50", "p95", "p99", "mean"))
        )
    return table


def _headline(report: Report) -> str:
    lines = [
        f"{report.output_tokens_per_s:.1f} output tokens/s, {report.requests_per_s:.2f} requests/s",
        f"{report.num_completed} of {report.num_requests} completed in {report.wall_s:.2f} s; "
        f"this client used {report.client_cpu_share:.1%} of a core",
    ]
    if report.goodput_per_s is not None:
        lines.append(
            f"goodput {report.goodput_per_s:.2f} requests/s "
            f"({report.num_within_slo} of {report.num_requests} within the SLO)"
        )
    lines += [f"{count} x {cause}" for cause, count in report.errors.items()]
    return "\n".join(lines)
