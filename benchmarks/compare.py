"""Servers in turns over one workload, in one sitting: medians with their spread, paired ratios.

    python -m benchmarks.compare --workload w1 --repeats 5 \\
        --server "aggregated=splitserve serve smollm2-135m --prefill 0" \\
        --server "split=splitserve serve smollm2-135m" \\
        --server peer=http://127.0.0.1:8100

In each repeat every server has its turn: it is started, warmed up, measured, and stopped, and the
next one starts when it is gone. A server given by its URL runs all the time and should be idle
meanwhile. A repeat has one seed for all servers, and another sitting has others, unless --seed is
given. Ratios are to the first server; runs in which something failed are in no median and no ratio.
--servers FILE takes a list from YAML instead, with what does not fit on the command line:

    vllm:
      command: vllm serve MODEL_DIRECTORY --dtype bfloat16 --port 8100
      env: {VLLM_CPU_KVCACHE_SPACE: 2}     # health, model, api_key and url can be given too

Without servers, the aggregated mode on all cores and 1P1D are compared. Fields of the workload can
be changed (--num-requests 8). Exit code 1: something failed; it is shown with the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.comparison import (
    Comparison,
    Turn,
    document,
    in_turn,
    report_text,
    turn_text,
)
from benchmarks.machine import OthersWatch, busy_share, facts
from benchmarks.servers import Running, Server, running, server_of, servers_of
from splitserve.bench.measure import measure
from splitserve.bench.plots import bench_plot
from splitserve.bench.workloads import (
    SPEC_FIELDS,
    WORKLOADS,
    Spec,
    fresh_seed,
    warm_up_of,
    workload_of,
)
from splitserve.commands.output_files import check_output_files, write_output
from splitserve.errors import ConfigError, SplitserveError
from splitserve.process import on_signals
from splitserve.profiling.report import require_plots

_SERVE = "splitserve serve smollm2-135m --dtype bfloat16 --max-model-len 2048"
OURS = (f"aggregated={_SERVE} --prefill 0 --decode 1", f"split={_SERVE} --prefill 1 --decode 1")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do in every turn."""

    workload: str
    spec: Spec  # of the first repeat
    num_repeats: int
    num_warm_up: int | None
    start_timeout_s: float


def turns(plan: Plan, servers: Sequence[Server]) -> Iterator[Turn]:
    """All of them, each told when it is over. One server at a time is up."""
    for repeat in range(plan.num_repeats):
        for server in in_turn(servers, repeat):
            yield one_turn(plan, server, repeat)


def one_turn(plan: Plan, server: Server, repeat: int) -> Turn:
    """Start, warm up, measure, stop. What fails is part of the answer."""
    spec = replace(plan.spec, seed=plan.spec.seed + repeat)
    turn = Turn(server.name, repeat, None, busy_before=busy_share())
    try:
        with running(server, plan.start_timeout_s) as up:
            turn = replace(turn, version=up.version)
            turn = _measured(turn, spec, warm_up_of(spec, plan.num_warm_up), up)
    except SplitserveError as error:
        return replace(turn, failure=str(error))
    return turn


def _measured(turn: Turn, spec: Spec, warm_up: Spec | None, up: Running) -> Turn:
    """With its measurement, and with what else ran meanwhile where the server is known apart."""
    watch = OthersWatch(up.session_id) if up.session_id is not None else None
    on_warm = watch.start if watch is not None else lambda: None
    measured = asyncio.run(measure(spec, warm_up, up.endpoint, on_warm=on_warm))
    return replace(turn, measured=measured, busy_others=watch.share() if watch else None)


def compare(plan: Plan, servers: Sequence[Server], json_file: Path | None) -> Comparison:
    """Run everything, telling each turn; the file is written anew after each, whole."""
    comparison = Comparison(plan.workload, plan.spec, tuple(servers), (), facts())
    for turn in turns(plan, servers):
        comparison = replace(comparison, turns=(*comparison.turns, turn))
        print(turn_text(turn, plan.num_repeats, plan.spec), flush=True)
        _is_written(json_file, partial(_json, comparison))
    return comparison


def _is_written(path: Path | None, make: Callable[[], str]) -> bool:
    """What can't be written is said, and ends no run."""
    try:
        if path is not None:
            write_output(path, make())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return False
    return True


def _json(comparison: Comparison) -> str:
    return json.dumps(document(comparison), indent=1) + "\n"


def _plot(comparison: Comparison) -> str:
    """Of the runs in which nothing failed."""
    clean = [turn for turn in comparison.turns if turn.is_clean]
    measured = [(turn.server, turn.measured.run) for turn in clean if turn.measured]
    names = [server.name for server in comparison.servers]
    return bench_plot({name: [run for one, run in measured if one == name] for name in names})


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        plan, servers = _plan(options), _servers(options)
        check_output_files({"the numbers": options.json, "the plot": options.plot})
        if options.plot is not None:
            require_plots("--plot")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    seed = plan.spec.seed
    print(f"seed {seed} (--seed {seed} sends the same prompts again)", flush=True)
    with on_signals(lambda number: sys.exit(128 + number)):  # servers are stopped on the way out
        comparison = compare(plan, servers, options.json)
    print(f"\n{report_text(comparison)}")
    is_told = _is_written(options.json, partial(_json, comparison))
    is_told &= _is_written(options.plot, partial(_plot, comparison))
    return 0 if is_told and all(turn.is_clean for turn in comparison.turns) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="w1")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--server", action="append", help="NAME=COMMAND or NAME=URL; repeatable")
    parser.add_argument("--servers", type=Path, help="a YAML file of servers")
    parser.add_argument("--warm-up", type=int, help="requests before each run; see bench --help")
    parser.add_argument("--start-timeout-s", type=float, default=300.0)
    parser.add_argument("--json", type=Path, help="write all numbers there")
    parser.add_argument("--plot", type=Path, help="write an SVG there; needs the extra plots")
    fields = parser.add_argument_group("fields of the workload")
    for name, is_whole in SPEC_FIELDS.items():
        fields.add_argument(f"--{name.replace('_', '-')}", type=int if is_whole else float)
    return parser


def _plan(options: argparse.Namespace) -> Plan:
    if options.repeats < 1:
        raise ConfigError(f"--repeats {options.repeats}: it must be 1 or more")
    given = {name: getattr(options, name) for name in SPEC_FIELDS}
    if options.seed is None:
        given["seed"] = fresh_seed()
    return Plan(
        workload=options.workload,
        spec=workload_of(options.workload, given),
        num_repeats=options.repeats,
        num_warm_up=options.warm_up,
        start_timeout_s=options.start_timeout_s,
    )


def _servers(options: argparse.Namespace) -> list[Server]:
    """At least one, each with a name of its own. Raises ConfigError."""
    servers = [server_of(text) for text in options.server or ()]
    if options.servers is not None:
        try:
            text = options.servers.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"can't read the servers in {options.servers}: {error}") from error
        servers += servers_of(text)
    servers = servers or [server_of(text) for text in OURS]
    names = [server.name for server in servers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two servers are called {', '.join(twice)}")
    return servers


if __name__ == "__main__":
    sys.exit(main())
