"""The entries of a profile's stream, made from JSON of which nothing is taken for granted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from splitserve.profiling.classify import classify
from splitserve.profiling.evidence import BOTTLENECKS, Evidence
from splitserve.profiling.step_log import COLUMNS, STEP, Rows

_MOST = 1e30  # far beyond anything measured; sums and products of a few are finite
_MAX_TEXT_CHARS = 200


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker is: its role, its place, its limits and its roofs. 0 is not known."""

    worker_id: str
    role: str = ""
    host: str = ""
    device: str = ""
    transport: str = ""
    num_cores: int = 0  # of its host
    num_threads: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    num_blocks_total: int = 0
    bytes_per_s: float = 0.0
    flops_per_s: float = 0.0
    weight_bytes: int = 0
    weight_bytes_per_number: int = 0
    kv_token_bytes: int = 0
    kv_int8_token_bytes: int = 0  # what that would be in int8


@dataclass(frozen=True, slots=True)
class Window:
    """The evidence of a window that ended `at`, seconds since the profile's start."""

    at: float
    evidence: Evidence


# How a request passes its time, one after the other.
STAGES = (
    "queue",
    "prefill",
    "delivery",
    "grant_wait",
    "transfer",
    "decode_wait",
    "first_step",
    "decode",
)


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of a request's life. Seconds; it began so long after the request arrived."""

    name: str
    start_s: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class Request:
    """A finished request: when it arrived, and what its timing says."""

    at: float  # seconds since the profile's start
    seconds: Mapping[str, float]  # by name, such as queue_s
    moments: Mapping[str, float]  # by name, such as first_kv_byte; seconds after it arrived
    num_kv_bytes: int = 0
    prefill_worker_id: str = ""
    decode_worker_id: str = ""

    @property
    def e2e_s(self) -> float:
        return self.seconds.get("e2e_s", 0.0)

    def stages(self) -> tuple[Stage, ...]:
        """Those that its timing knows, in order, none beyond its end. "decode" is the rest."""
        found, now = [], 0.0
        for name in STAGES[:-1]:
            length_s = min(max(0.0, self.seconds.get(f"{name}_s", 0.0)), self.e2e_s - now)
            if length_s > 0:
                found.append(Stage(name, now, length_s))
                now += length_s
        if now < self.e2e_s:
            found.append(Stage(STAGES[-1], now, self.e2e_s - now))
        return tuple(found)

    def transfer_span(self) -> tuple[float, float] | None:
        """When its KV travelled, seconds after it arrived: from the first byte to the last where
        they are known, else the stage. None when there was no transfer."""
        first, last = self.moments.get("first_kv_byte"), self.moments.get("last_kv_byte")
        if first is not None and last is not None:
            return first, max(first, last)
        stages = {stage.name: stage for stage in self.stages()}
        if stage := stages.get("transfer"):
            return stage.start_s, stage.start_s + stage.duration_s
        return None


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operation as torch.profiler saw it; seconds since the profile's start."""

    name: str
    start_s: float
    duration_s: float


def number(value: Any) -> float:
    """0 for what is missing, not finite, larger than anything or no number at all."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MOST:
        return 0.0
    return float(value)


def text(value: Any) -> str:
    """One short line that every terminal and file can show."""
    shown = str(value)[:_MAX_TEXT_CHARS]
    return shown if shown.isprintable() else "".join(c if c.isprintable() else "?" for c in shown)


def facts_from(said: Mapping[str, Any]) -> WorkerFacts:
    """Raises KeyError without a worker_id."""
    return WorkerFacts(**{**_known(WorkerFacts, said), "worker_id": text(said["worker_id"])})


def guessed_facts(worker_id: str) -> WorkerFacts:
    """Of a worker that nobody introduced: ids begin with the role."""
    return WorkerFacts(worker_id, worker_id.partition("-")[0])


def window_from(said: Mapping[str, Any]) -> Window:
    """Raises KeyError or TypeError. A class that this version does not know is decided anew."""
    evidence = Evidence(**_known(Evidence, said["evidence"]))
    if evidence.bottleneck not in BOTTLENECKS:
        evidence = dataclasses.replace(evidence, bottleneck=classify(evidence))
    return Window(number(said["at"]), evidence)


def request_from(said: Mapping[str, Any]) -> Request:
    """Raises KeyError or AttributeError."""
    timing: Mapping[str, Any] = said["timing"]
    return Request(
        at=number(said["at"]),
        seconds=_numbers({k: v for k, v in timing.items() if k.endswith("_s")}),
        moments=_numbers(timing.get("moments") or {}),
        num_kv_bytes=int(number(timing.get("num_kv_bytes"))),
        prefill_worker_id=text(timing.get("prefill_worker_id") or ""),
        decode_worker_id=text(timing.get("decode_worker_id") or ""),
    )


def kernel_from(said: Sequence[Any]) -> Kernel:
    """Raises ValueError."""
    name, start_s, duration_s = said
    return Kernel(text(name), number(start_s), max(0.0, number(duration_s)))


def rows_from(columns: Sequence[str], said: Sequence[Sequence[Any]]) -> Rows:
    """Rows of STEP; a column that was not sent is 0. Raises ValueError for rows of uneven length,
    TypeError for what is no number."""
    values = np.nan_to_num(np.array(said, dtype="f8").reshape(len(said), len(columns)))
    values = values.clip(-_MOST, _MOST)
    rows: Rows = np.zeros(len(said), STEP)
    for name, column in zip(columns, values.T, strict=True):
        if name in COLUMNS:
            kind = STEP[name]
            if kind.kind == "i":
                column = column.clip(0, np.iinfo(kind).max // 2)  # the largest float may be above
            rows[name] = column
    return rows


def _numbers(said: Mapping[str, Any]) -> dict[str, float]:
    return {name: number(value) for name, value in said.items() if value is not None}


def _known(kind: type[Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """What `said` has of the fields of `kind`, each of the type of its default."""
    known: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.name in said and field.default is not dataclasses.MISSING:
            value, default = said[field.name], field.default
            known[field.name] = (
                text(value) if isinstance(default, str) else type(default)(number(value))
            )
    return known
