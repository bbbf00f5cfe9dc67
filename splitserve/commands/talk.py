"""Commands that talk to a running cluster: `scale`, `status`, `chat`."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from splitserve.commands.options import API_KEY, BASE_URL

_COLUMNS = ("worker", "state", "pid", "host", "run / wait", "blocks used / all", "tokens in / out")
_STATE_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow", "dead": "red"}


def scale(
    prefill: int = typer.Option(..., min=0, help="Wanted number of prefill workers."),
    decode: int = typer.Option(..., min=1, help="Wanted number of decode workers."),
    base_url: str = BASE_URL,
    api_key: str | None = API_KEY,
) -> None:
    """Set the wanted numbers of workers of a running cluster."""
    from splitserve.client import Client

    with Client(base_url, api_key) as client:
        target = client.scale(prefill=prefill, decode=decode)
    print(f"target: {target}")


def status(base_url: str = BASE_URL, api_key: str | None = API_KEY) -> None:
    """Show the workers of a running cluster."""
    from splitserve.client import Client

    with Client(base_url, api_key) as client:
        cluster = client.cluster()
    Console().print(status_table(cluster))


def status_table(cluster: dict[str, Any]) -> Table:
    """GET /cluster as a table, one row a worker."""
    target, coordinator = cluster["target"], cluster["coordinator"]
    title = (
        f"{cluster['model']}: {target['prefill']} prefill and {target['decode']} decode wanted, "
        f"{coordinator['num_requests_in_flight']} requests in flight, "
        f"{coordinator['num_requests_waiting']} waiting"
    )
    table = Table(*_COLUMNS, title=title)
    for worker in cluster["workers"]:
        table.add_row(*_cells(worker), style=_STATE_STYLES.get(worker["state"]))
    return table


def _cells(worker: dict[str, Any]) -> tuple[str, ...]:
    """One worker as `_COLUMNS`; what it has not told yet is empty."""

    def pair(left: str, right: str) -> str:
        return f"{worker.get(left, '')} / {worker.get(right, '')}"

    return (
        str(worker["worker_id"]),
        str(worker["state"]),
        str(worker["pid"]),
        str(worker["host"]),
        pair("num_requests_running", "num_requests_waiting"),
        pair("num_blocks_used", "num_blocks_total"),
        pair("num_tokens_prefilled", "num_tokens_decoded"),
    )


def chat(
    base_url: str = BASE_URL,
    api_key: str | None = API_KEY,
    system: str | None = typer.Option(None, help="What the model is told before anything else."),
    temperature: float | None = typer.Option(None, min=0.0, help="0 is greedy."),
    max_tokens: int | None = typer.Option(None, min=1, help="Longest answer."),
) -> None:
    """Talk to the model in the terminal. Ctrl-C cuts an answer, Ctrl-D ends."""
    from splitserve.client import Client

    console = Console()
    messages: list[dict[str, str]] = []
    if system:
        messages.append({"role": "system", "content": system})
    with Client(base_url, api_key) as client:
        console.print(f"[dim]{client.model} at {client.base_url}[/dim]")
        while (line := _ask(console)) is not None:
            messages.append({"role": "user", "content": line})
            answer = _answer(client, messages, temperature=temperature, max_tokens=max_tokens)
            messages.append({"role": "assistant", "content": answer})


def _ask(console: Console) -> str | None:
    """The user's next line; None at the end of input."""
    while True:
        try:
            line = console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return None
        if line:
            return line


def _answer(client: Any, messages: list[dict[str, str]], **options: Any) -> str:
    parts: list[str] = []
    with client.chat(messages, stream=True, **options) as stream:
        try:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
                parts.append(chunk.text)
        except KeyboardInterrupt:
            print(" [cut]", end="")
    print()
    return "".join(parts)
