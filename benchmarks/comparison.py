"""What a comparison found: turns of servers, numbers with their spread, ratios of pairs. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from benchmarks.servers import Server
from splitserve.bench.measure import Measured, repeat_document
from splitserve.bench.repeats import Numbers, Spread, paired_ratios, spreads
from splitserve.bench.table import doubts, label
from splitserve.bench.workloads import MixedSpec, Spec

_REQUESTS = (
    "output_tokens_per_s",
    "ttft_p50_ms",
    "ttft_p95_ms",
    "ttft_max_ms",
    "handoff_gap_p50_ms",
    "tpot_p50_ms",
    "tpot_p95_ms",
    "itl_p50_ms",
    "itl_p99_ms",
    "goodput_per_s",
)
_MIXED = (
    "stream_itl_p50_ms",
    "stream_itl_p99_ms",
    "stream_itl_max_ms",
    "undisturbed_itl_p50_ms",
    "undisturbed_itl_p99_ms",
    "itl_p50_over_undisturbed",
    "long_ttft_p50_ms",
    "long_ttft_max_ms",
    "stream_ttft_p50_ms",
    "stream_ttft_max_ms",
    "stream_tokens_per_s",
)
_NUM_IN_A_LINE = 4
_BUSY_SHARE = 0.1  # of the machine: more is not "nothing else running"
_LEFT_OUT = ", runs with failures left out"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Turn:
    """One server's run in one repeat, or why there is none. Shares are of the whole machine."""

    server: str
    repeat: int
    measured: Measured | None
    failure: str | None = None
    busy_before: float = 0.0  # in use before the server started
    busy_others: float | None = None  # while measured, by others; None: not known
    version: str | None = None  # of the server, if it tells

    @property
    def numbers(self) -> Numbers | None:
        """None also when something failed: a server that loses its slow requests looks fast."""
        return self.measured.report.numbers if self.measured and self.is_clean else None

    @property
    def is_doubtful(self) -> bool:
        """Something of it has to be said beside its numbers."""
        warned = bool(self.measured and self.measured.report.warnings)
        is_busy = max(self.busy_before, self.busy_others or 0.0) > _BUSY_SHARE
        return warned or not self.is_clean or is_busy

    @property
    def is_clean(self) -> bool:
        """Nothing failed: not the server, and none of the requests."""
        return self.failure is None and not (self.measured and self.measured.report.num_failed)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The turns so far of some servers under one workload. Ratios are to the first server."""

    workload: str
    spec: Spec
    servers: tuple[Server, ...]
    turns: tuple[Turn, ...]
    facts: Mapping[str, object] = field(default_factory=dict)  # about where it was measured

    def numbers(self, server: Server) -> dict[str, Spread]:
        """Of each number, over the server's turns in which nothing failed."""
        return spreads([found for found in self._by_repeat(server) if found is not None])

    def ratios(self, server: Server) -> dict[str, Spread]:
        """Of each number, the server's to the first server's in the same repeat."""
        return paired_ratios(self._by_repeat(self.servers[0]), self._by_repeat(server))

    def _by_repeat(self, server: Server) -> list[Numbers | None]:
        num_repeats = 1 + max((turn.repeat for turn in self.turns), default=-1)
        found = {t.repeat: t.numbers for t in self.turns if t.server == server.name}
        return [found.get(repeat) for repeat in range(num_repeats)]


def in_turn(servers: Sequence[_T], repeat: int) -> list[_T]:
    """The order of a repeat: there and back, so that a drift of the machine favours nobody."""
    return list(servers) if repeat % 2 == 0 else list(reversed(servers))


def turn_text(turn: Turn, num_repeats: int, spec: Spec) -> str:
    """A line about a turn, and one for each thing that failed in it."""
    lines = [f"repeat {turn.repeat + 1} of {num_repeats}, {turn.server}: "]
    if turn.measured is not None:
        numbers = turn.measured.report.numbers
        names = [name for name in _shown(spec) if name in numbers][:_NUM_IN_A_LINE]
        lines[0] += ", ".join(f"{label(name)} {numbers[name]:.1f}" for name in names)
        lines += doubts([turn.measured.report])
    if turn.busy_before > _BUSY_SHARE:
        lines.append(f"WARNING: {turn.busy_before:.0%} of the machine was in use before the start")
    if turn.busy_others is not None and turn.busy_others > _BUSY_SHARE:
        share = f"{turn.busy_others:.0%} of the machine"
        lines.append(f"WARNING: others used {share} while this was measured")
    if turn.failure is not None:
        lines.append(f"FAILED: {turn.failure}")
    return "\n".join(lines)


def report_text(comparison: Comparison) -> str:
    """Two Markdown tables: medians with their spread, and paired ratios; then all that failed."""
    first, *others = comparison.servers
    columns = {_heading(comparison, s): comparison.numbers(s) for s in comparison.servers}
    left_out = "" if all(turn.is_clean for turn in comparison.turns) else _LEFT_OUT
    parts = [_table(f"median (least..greatest){left_out}", columns, comparison.spec)]
    if others:
        ratios = {f"{s.name} / {first.name}": comparison.ratios(s) for s in others}
        parts.append(_table(f"paired, repeat by repeat{left_out}", ratios, comparison.spec))
    num_repeats = 1 + max((turn.repeat for turn in comparison.turns), default=-1)
    texts = [turn_text(t, num_repeats, comparison.spec) for t in comparison.turns if t.is_doubtful]
    if texts:
        parts.append("\n".join(["Not all went well:", *texts]))
    return "\n\n".join(parts)


def _heading(comparison: Comparison, server: Server) -> str:
    """The server's name; with the number of its runs that count where some do not."""
    turns = [turn for turn in comparison.turns if turn.server == server.name]
    num_clean = sum(turn.numbers is not None for turn in turns)
    missing = f" ({num_clean} of {len(turns)} runs)" if num_clean < len(turns) else ""
    return server.name + missing


def _table(title: str, columns: Mapping[str, Mapping[str, Spread]], spec: Spec) -> str:
    rows = [[title, *columns]]
    for name in _shown(spec):
        found = [numbers.get(name) for numbers in columns.values()]
        if any(found):
            rows.append([label(name), *(str(one) if one else "-" for one in found)])
    return markdown(rows)


def _shown(spec: Spec) -> tuple[str, ...]:
    return _MIXED if isinstance(spec, MixedSpec) else _REQUESTS


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table, its first row the heading, padded so that it also reads as plain text."""
    widths = [max(3, *(len(cell) for cell in column)) for column in zip(*rows, strict=True)]

    def line(cells: Iterable[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    heading, *others = rows
    rule = ["-" * width for width in widths]
    return "\n".join([line(heading), line(rule), *map(line, others)])


def document(comparison: Comparison) -> dict[str, Any]:
    """Everything, for a JSON file; secrets are left out."""
    servers = comparison.servers
    return {
        "workload": comparison.workload,
        "spec": dataclasses.asdict(comparison.spec),
        "measured_on": dict(comparison.facts),
        "servers": [server.described() for server in servers],
        "numbers": {s.name: _plain(comparison.numbers(s)) for s in servers},
        "ratios": {s.name: _plain(comparison.ratios(s)) for s in servers[1:]},
        "turns": [_turn_document(turn) for turn in comparison.turns],
    }


def _plain(numbers: Mapping[str, Spread]) -> dict[str, Any]:
    return {name: dataclasses.asdict(spread) for name, spread in numbers.items()}


def _turn_document(turn: Turn) -> dict[str, Any]:
    found = repeat_document(turn.measured) if turn.measured else {}
    return {
        "server": turn.server,
        "version": turn.version,
        "repeat": turn.repeat,
        "is_clean": turn.is_clean,
        "failure": turn.failure,
        "busy_before": turn.busy_before,
        "busy_others": turn.busy_others,
        **found,
    }
