"""Servers in turns over one workload, in one sitting: medians with their spread, paired ratios.

    python -m benchmarks.compare --workload w1 --repeats 5 \\
        --server "aggregated=splitserve serve smollm2-135m --prefill 0" \\
        --server "split=splitserve serve smollm2-135m" \\
        --server peer=http://127.0.0.1:8100

In each repeat every server has its turn: it is started, warmed up, measured, and stopped, and the
next one starts when it is gone. A server given by its URL runs all the time and should be idle
meanwhile. A repeat has one seed for all servers. Ratios are to the first server. --servers FILE
takes a list from YAML instead, with what does not fit on the command line:

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.comparison import (
    Comparison,
    Turn,
    document,
    in_turn,
    report_text,
    turn_text,
)
from benchmarks.machine import busy_share
from benchmarks.servers import Server, running, server_of, servers_of
from splitserve.bench.measure import measure
from splitserve.bench.plots import bench_plot
from splitserve.bench.workloads import SPEC_FIELDS, WORKLOADS, Spec, warm_up_of, workload_of
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
    measured, busy_before = None, busy_share()
    try:
        with running(server, plan.start_timeout_s) as endpoint:
            measured = asyncio.run(measure(spec, warm_up_of(spec, plan.num_warm_up), endpoint))
    except SplitserveError as error:
        return Turn(server.name, repeat, measured, str(error), busy_before)
    return Turn(server.name, repeat, measured, None, busy_before)


def compare(plan: Plan, servers: Sequence[Server], json_file: Path | None) -> Comparison:
    """Run everything, telling each turn; the file is written anew after each, whole."""
    comparison = Comparison(plan.workload, plan.spec, tuple(servers), ())
    for turn in turns(plan, servers):
        comparison = replace(comparison, turns=(*comparison.turns, turn))
        print(turn_text(turn, plan.num_repeats, plan.spec), flush=True)
        if json_file is not None:
            text = json.dumps(document(comparison), indent=1)
            json_file.write_text(text + "\n", encoding="utf-8")
    return comparison


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        plan, servers = _plan(options), _servers(options)
        if options.plot is not None:
            require_plots("--plot")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with on_signals(lambda number: sys.exit(128 + number)):  # servers are stopped on the way out
        comparison = compare(plan, servers, options.json)
    print(f"\n{report_text(comparison)}")
    if options.plot is not None:
        measured = [(turn.server, turn.measured.run) for turn in comparison.turns if turn.measured]
        series = {s.name: [run for name, run in measured if name == s.name] for s in servers}
        options.plot.write_text(bench_plot(series), encoding="utf-8")
    return 0 if all(turn.is_clean for turn in comparison.turns) else 1


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
    given = {name: getattr(options, name) for name in SPEC_FIELDS}
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
        servers += servers_of(options.servers.read_text(encoding="utf-8"))
    servers = servers or [server_of(text) for text in OURS]
    names = [server.name for server in servers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two servers are called {', '.join(twice)}")
    return servers


if __name__ == "__main__":
    sys.exit(main())
