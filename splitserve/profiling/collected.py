"""Reading a profile: the NDJSON stream of `POST /cluster/profile` in, what it says out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from splitserve.errors import RequestFailedError, StreamBrokenError
from splitserve.profiling.entries import (
    Kernel,
    Request,
    Window,
    WorkerFacts,
    facts_from,
    guessed_facts,
    kernel_from,
    number,
    request_from,
    rows_from,
    text,
    window_from,
)
from splitserve.profiling.roofs import roofs_of
from splitserve.profiling.step_log import COLUMNS, STEP, Rows
from splitserve.work import Ceilings

# What is kept of a stream at most; the rest is counted. A million rows are 150 MB.
LIMITS = {"steps": 1_000_000, "window": 100_000, "request": 200_000, "kernels": 200_000}
_MAX_WORKERS = 1024
_MAX_LINE_BYTES = 4 << 20  # the longest is one of a thousand operations, 0.9 MB


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """What one worker told of itself."""

    facts: WorkerFacts
    steps: Rows  # ended_at in seconds since the profile's start
    windows: tuple[Window, ...]
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """What came of a cluster within a stretch of time."""

    model: str
    asked_s: float
    observed_s: float
    target: Mapping[str, int]  # wanted workers by role
    workers: tuple[WorkerProfile, ...]
    requests: tuple[Request, ...]  # by arrival
    is_whole: bool  # the cluster said that it was over
    num_dropped: int  # entries beyond what is kept here, or could wait there
    num_unreadable: int  # lines that were cut or malformed


@dataclass(slots=True)
class _Heard:
    facts: WorkerFacts
    steps: list[Rows] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)

    def profile(self) -> WorkerProfile:
        steps = np.concatenate(self.steps) if self.steps else np.zeros(0, STEP)
        return WorkerProfile(self._facts(), steps, tuple(self.windows), tuple(self.kernels))

    def _facts(self) -> WorkerFacts:
        """With roofs as high as the worker has raised them since it was introduced."""
        said = Ceilings(self.facts.bytes_per_s, self.facts.flops_per_s)
        if not (said.bytes_per_s and said.flops_per_s):
            return self.facts
        roofs = roofs_of((window.evidence for window in self.windows), said)
        return replace(
            self.facts,
            bytes_per_s=number(roofs.bytes_per_s) or said.bytes_per_s,
            flops_per_s=number(roofs.flops_per_s) or said.flops_per_s,
        )


class Collector:
    """Owns what came of a stream so far: bytes go in as they arrive, `profile` is what they say."""

    def __init__(self, limits: Mapping[str, int] = LIMITS) -> None:
        self.elapsed_s = 0.0  # of the profile, by its own stamps
        self.num_steps = self.num_requests = 0
        self.has_started = self.is_whole = False
        self._tail = b""
        self._start: dict[str, Any] = {}
        self._workers: dict[str, _Heard] = {}
        self._requests: list[Request] = []
        self._room = dict(limits)
        self._num_dropped = self._num_unreadable = 0
        self._takers = {
            "start": self._take_start,
            "worker": self._take_worker,
            "steps": self._take_steps,
            "window": self._take_window,
            "request": self._take_request,
            "kernels": self._take_kernels,
            "end": self._take_end,
        }

    def feed(self, data: bytes) -> None:
        """Raises RequestFailedError when the cluster reports an error, StreamBrokenError for what
        is no profile; what came before stays."""
        *lines, self._tail = (self._tail + data).split(b"\n")
        if len(self._tail) > _MAX_LINE_BYTES:
            raise StreamBrokenError(f"a line of the profile is longer than {_MAX_LINE_BYTES} bytes")
        for line in lines:
            if line.strip():
                self._take_line(line)

    def profile(self) -> Profile:
        """Everything so far. Raises StreamBrokenError when not even the start has come."""
        if not self.has_started:
            raise StreamBrokenError("the profile ended before it began")
        target = self._start.get("target")
        return Profile(
            model=text(self._start.get("model", "")),
            asked_s=number(self._start.get("duration_s")),
            observed_s=self.elapsed_s,
            target={text(role): int(number(wanted)) for role, wanted in dict(target or {}).items()},
            workers=tuple(heard.profile() for heard in self._workers.values()),
            requests=tuple(sorted(self._requests, key=lambda request: request.at)),
            is_whole=self.is_whole,
            num_dropped=self._num_dropped,
            num_unreadable=self._num_unreadable + bool(self._tail.strip()),
        )

    def _take_line(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return self._refuse(line)
        if not isinstance(message, dict):
            return self._refuse(line)
        kind = message.get("type")
        if kind == "error" or "error" in message:
            raise RequestFailedError(f"the cluster gave the profile up: {_error_text(message)}")
        if not self.has_started and kind != "start":
            return self._refuse(line)
        if taker := self._takers.get(str(kind)):
            try:
                taker(message)
            except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
                self._refuse(line)

    def _refuse(self, line: bytes) -> None:
        """Within a profile a bad line is counted; something that begins with one is none."""
        if not self.has_started:
            said = text(line[:200].decode(errors="replace"))
            raise StreamBrokenError(f"what answers there sends no profile: {said}")
        self._num_unreadable += 1

    def _take_start(self, message: dict[str, Any]) -> None:
        for said in message["workers"]:
            self._take_worker(said)
        dict(message.get("target") or {})  # raises for what `profile` could not read
        self._start = message
        self.has_started = True

    def _take_worker(self, said: dict[str, Any]) -> None:
        """One that was there at the start, or joined since."""
        facts = facts_from(said)
        self._worker(facts.worker_id).facts = facts

    def _take_steps(self, message: dict[str, Any]) -> None:
        rows = rows_from(self._start.get("columns") or COLUMNS, message["rows"])
        rows = rows[: self._admit("steps", len(rows))]
        if len(rows):
            self._worker(message["worker_id"]).steps.append(rows)
            self.num_steps += len(rows)
            self._saw(float(rows["ended_at"][-1]))

    def _take_window(self, message: dict[str, Any]) -> None:
        window = window_from(message)
        windows = self._worker(message["worker_id"]).windows
        if windows and windows[-1].evidence.window == window.evidence.window > 0:
            return  # told twice
        if self._admit("window", 1):
            windows.append(window)
            self._saw(window.at)

    def _take_request(self, message: dict[str, Any]) -> None:
        request = request_from(message)
        if self._admit("request", 1):
            self._requests.append(request)
            self.num_requests += 1

    def _take_kernels(self, message: dict[str, Any]) -> None:
        kernels = [kernel_from(event) for event in message["events"]]
        admitted = kernels[: self._admit("kernels", len(kernels))]
        self._worker(message["worker_id"]).kernels.extend(admitted)

    def _take_end(self, message: dict[str, Any]) -> None:
        self.is_whole = True
        self._num_dropped += int(number(message.get("num_lost")))
        self._saw(number(message.get("at")))

    def _admit(self, kind: str, num_wanted: int) -> int:
        num_admitted = min(num_wanted, self._room[kind])
        self._room[kind] -= num_admitted
        self._num_dropped += num_wanted - num_admitted
        return num_admitted

    def _worker(self, worker_id: Any) -> _Heard:
        """Raises ValueError beyond so many workers as no cluster has."""
        name = text(worker_id)
        if name not in self._workers:
            if len(self._workers) == _MAX_WORKERS:
                raise ValueError("too many workers")
            self._workers[name] = _Heard(guessed_facts(name))
        return self._workers[name]

    def _saw(self, at: float) -> None:
        self.elapsed_s = max(self.elapsed_s, at)


def _error_text(message: dict[str, Any]) -> str:
    detail = message.get("error", message.get("message", "it does not say why"))
    return str(detail.get("message", detail) if isinstance(detail, dict) else detail)
