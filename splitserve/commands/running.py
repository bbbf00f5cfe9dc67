"""Commands about a running cluster: `scale`, `restart`, `status`."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from splitserve.commands.options import API_KEY, BASE_URL
from splitserve.errors import ConfigError, UnavailableError

_COLUMNS = (
    "state",
    "pid",
    "host",
    "run / wait",
    "blocks used / all",
    "tokens in / out",
    "bound by",
)
_STATE_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow", "dead": "red"}
_POLL_S = 0.5
_PIPE_WIDTH = 200  # of a table that no terminal bounds


class Pool(StrEnum):
    """As `--pool` takes it."""

    prefill = "prefill"
    decode = "decode"


def scale(
    prefill: int | None = typer.Option(None, min=0, help="Wanted number of prefill workers."),
    decode: int | None = typer.Option(None, min=1, help="Wanted number of decode workers."),
    base_url: str = BASE_URL,
    api_key: str | None = API_KEY,
) -> None:
    """Set the wanted numbers of workers of a running cluster; what isn't given stays."""
    from splitserve.client import Client

    if prefill is None and decode is None:
        raise ConfigError("say how many: --prefill N, --decode N, or both")
    with Client(base_url, api_key) as client:
        if prefill is None or decode is None:
            target = client.cluster()["target"]
            prefill = target["prefill"] if prefill is None else prefill
            decode = target["decode"] if decode is None else decode
        client.scale(prefill=prefill, decode=decode)
    print(f"wanted: {prefill} prefill, {decode} decode; see `splitserve status`")


def restart(
    pool: Pool = typer.Option(..., help="Which workers to replace."),
    timeout_s: float = typer.Option(600.0, min=1, help="For how long to watch it happen."),
    base_url: str = BASE_URL,
    api_key: str | None = API_KEY,
) -> None:
    """Replace the workers of a pool one by one; each leaves when its replacement is ready."""
    from splitserve.client import Client

    with Client(base_url, api_key) as client:
        waiting = set(client.restart(pool.value)["worker_ids"])
        print(f"replacing {', '.join(sorted(waiting)) or 'nobody: the pool is empty'}")
        deadline = time.monotonic() + timeout_s
        while waiting and time.monotonic() < deadline:
            time.sleep(_POLL_S)  # between two looks at another process
            workers = client.cluster()["workers"]
            left = {w["worker_id"] for w in workers if w["state"] != "dead"}
            for worker_id in sorted(waiting - left):
                print(f"{worker_id} is replaced")
            waiting &= left
    if waiting:
        raise UnavailableError(f"still there: {', '.join(sorted(waiting))}; `splitserve status`")


def status(
    base_url: str = BASE_URL,
    api_key: str | None = API_KEY,
    show_all: bool = typer.Option(False, "--all", help="List dead workers too."),
) -> None:
    """Show the workers of a running cluster."""
    from splitserve.client import Client

    with Client(base_url, api_key) as client:
        cluster = client.cluster()
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _PIPE_WIDTH)
    console.print(headline(cluster), soft_wrap=True)
    workers = cluster["workers"]
    listed = [one for one in workers if show_all or one["state"] != "dead"]
    console.print(worker_table(listed))
    if previous_end := cluster["coordinator"].get("previous_end"):
        text = f"the coordinator was started again; the one before: {previous_end}"
        console.print(text, markup=False, soft_wrap=True)
    for failure in cluster["failures"]:
        console.print(failure_text(failure), markup=False, soft_wrap=True)
    if num_dead := len(workers) - len(listed):
        noun = "worker" if num_dead == 1 else "workers"
        console.print(f"{num_dead} dead {noun} (--all lists them)")


def headline(cluster: dict[str, Any]) -> str:
    """GET /cluster in one sentence."""
    target, coordinator = cluster["target"], cluster["coordinator"]
    return (
        f"{cluster['model']}: {target['prefill']} prefill and {target['decode']} decode wanted, "
        f"{coordinator['num_requests_in_flight']} requests in flight, "
        f"{coordinator['num_requests_waiting']} waiting"
    )


def failure_text(failure: dict[str, Any]) -> str:
    """Why a worker's process died the first time, with the end of what it printed then."""
    times = "once" if failure["num_failures"] == 1 else f"{failure['num_failures']} times"
    then = "given up" if failure["given_up"] else "started again"
    text = f"{failure['role']}: died {times}, {then}; first {failure['launch_id']}: "
    ended_itself = "exited with code" in failure["reason"]  # else its last lines tell nothing
    lines = failure["last_lines"].splitlines() if ended_itself else []
    return "".join([text, failure["reason"], *(f"\n    {line}" for line in lines)])


def worker_table(workers: list[dict[str, Any]]) -> Table:
    """One row a worker; ids are never cut."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    longest_id = max((len(str(worker["worker_id"])) for worker in workers), default=0)
    table.add_column("worker", no_wrap=True, min_width=longest_id)
    for name in _COLUMNS:
        table.add_column(name, overflow="fold")
    for worker in workers:
        table.add_row(*_cells(worker), style=_STATE_STYLES.get(worker["state"]))
    return table


def _cells(worker: dict[str, Any]) -> tuple[str, ...]:
    """One worker as a row; what it has not told yet is a dash."""

    def shown(key: str) -> str:
        value = worker.get(key)
        return "-" if value is None else str(value)

    def pair(left: str, right: str) -> str:
        return f"{shown(left)} / {shown(right)}"

    return (
        shown("worker_id"),
        shown("state"),
        shown("pid"),
        shown("host"),
        pair("num_requests_running", "num_requests_waiting"),
        pair("num_blocks_used", "num_blocks_total"),
        pair("num_tokens_prefilled", "num_tokens_decoded"),
        shown("bottleneck"),
    )
