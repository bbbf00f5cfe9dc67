"""A profile as a trace that Perfetto and chrome://tracing open.

After the "Trace Event Format" document of the Chromium project: complete events (X) for slices that
nest, async events (b, e) for those that overlap, counters (C), names of processes and threads (M).
Times are microseconds. A wait is blank space.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import numpy as np

from splitserve.profiling.collected import Profile, WorkerProfile
from splitserve.profiling.entries import Kernel, Request
from splitserve.profiling.evidence import SLOT_LIMITS, Phase
from splitserve.profiling.step_log import Rows

# As a loop goes through them. Waits come before and are no slices.
_PHASES: tuple[Phase, ...] = (
    "receive",
    "schedule",
    "prepare",
    "forward",
    "sample",
    "send",
    "other",
)
_STEPS, _TRANSFERS, _KERNELS = 1, 2, 3  # threads of a worker; of kernels there may be more
_CLUSTER = 1  # the process of requests; workers follow
_ARGS = ("num_prefill_tokens", "num_decode_tokens", "num_bytes", "num_flops")

Event = dict[str, Any]


def write_trace(profile: Profile, file: TextIO) -> None:
    """One event a line, so that not all of them are in memory at once."""
    file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    for place, event in enumerate(trace_events(profile)):
        file.write(f"{',' if place else ' '}{json.dumps(event)}\n")
    file.write("]}\n")


def trace_events(profile: Profile) -> Iterator[Event]:
    """All of them, track by track."""
    yield _named("process_name", _CLUSTER, 0, f"requests to {profile.model}")
    pids = {worker.facts.worker_id: pid for pid, worker in enumerate(profile.workers, _CLUSTER + 1)}
    for number, request in enumerate(profile.requests):
        yield from _request_events(number, request)
        yield from _transfer_events(number, request, pids.get(request.decode_worker_id))
    for worker in profile.workers:
        yield from _worker_events(worker, pids[worker.facts.worker_id])


def _worker_events(worker: WorkerProfile, pid: int) -> Iterator[Event]:
    yield _named("process_name", pid, 0, worker.facts.worker_id)
    yield _named("thread_name", pid, _STEPS, "steps")
    previous_ns = 0
    for row in worker.steps:
        edges = _edges_ns(row, previous_ns)
        previous_ns = edges[-1]
        yield from _step_events(row, edges, pid)
        yield from _counters(row, edges[0], worker, pid)
    yield from _kernel_events(worker.kernels, pid)


def _edges_ns(row: Rows, previous_ns: int) -> list[int]:
    """Where each phase of a step begins, and where the last one ends, not before the step before
    ended: laps are exact, their sums are rounded."""
    lengths = np.array([max(0.0, float(row[f"{phase}_s"])) for phase in _PHASES])
    ends = float(row["ended_at"]) - lengths.sum() + np.concatenate([[0.0], lengths.cumsum()])
    return [max(previous_ns, round(1e9 * float(edge))) for edge in ends]


def _step_events(row: Rows, edges: Sequence[int], pid: int) -> Iterator[Event]:
    args: Event = {name: int(row[name]) for name in _ARGS}
    limit = int(row["slot_limit"])
    args["why not more"] = SLOT_LIMITS[limit] if limit < len(SLOT_LIMITS) else "not known"
    place = {"pid": pid, "tid": _STEPS}
    yield _slice("step", edges[0], edges[-1], place) | {"args": args}
    for phase, start, end in zip(_PHASES, edges[:-1], edges[1:], strict=True):
        if end > start:
            yield _slice(phase, start, end, place)


def _counters(row: Rows, at_ns: int, worker: WorkerProfile, pid: int) -> Iterator[Event]:
    used, allowed = int(row["num_slots_used"]), int(row["num_slots_allowed"])
    yield _counter("batch slots", at_ns, pid, {"used": used, "free": max(0, allowed - used)})
    yield _counter("KV blocks", at_ns, pid, {"used": int(row["num_kv_blocks_used"])})
    possible = worker.facts.bytes_per_s * float(row["forward_s"])
    if possible > 0:
        # A single step may be above a roof that its whole window stays under.
        share = round(100 * min(1.0, float(row["num_bytes"]) / possible), 2)
        yield _counter("achieved bandwidth, %", at_ns, pid, {"of peak": share})


def _request_events(number: int, request: Request) -> Iterator[Event]:
    """The request around its stages; they share an id, so they nest."""
    arrived_ns = round(1e9 * request.at)
    args = {"prefill": request.prefill_worker_id, "decode": request.decode_worker_id}
    end_ns = arrived_ns + round(1e9 * request.e2e_s)
    first, last = _async("request", "request", number, (arrived_ns, end_ns), (_CLUSTER, args))
    yield first
    for stage in request.stages():
        start_ns = arrived_ns + round(1e9 * stage.start_s)
        stage_end_ns = min(end_ns, arrived_ns + round(1e9 * (stage.start_s + stage.duration_s)))
        yield from _async("request", stage.name, number, (start_ns, stage_end_ns), (_CLUSTER, {}))
    yield last


def _transfer_events(number: int, request: Request, pid: int | None) -> Iterator[Event]:
    """On the worker that received. Transfers overlap, so they are no slices of a thread."""
    span = request.transfer_span()
    if span is None or pid is None:
        return
    start_ns, end_ns = (round(1e9 * (request.at + moment)) for moment in span)
    if end_ns <= 0:
        return  # before the trace begins
    args = {"num_kv_bytes": request.num_kv_bytes, "from": request.prefill_worker_id}
    yield from _async("transfer", "KV transfer", number, (start_ns, end_ns), (pid, args))


def _kernel_events(kernels: Sequence[Kernel], pid: int) -> Iterator[Event]:
    """On one thread those that lie in each other or apart; one that overlaps goes to the next."""
    lanes: list[list[int]] = []  # of each thread the ends of the slices that are open
    for kernel in sorted(kernels, key=lambda k: (k.start_s, -k.duration_s)):
        start, end = round(1e9 * kernel.start_s), round(1e9 * (kernel.start_s + kernel.duration_s))
        lane = _lane(lanes, start, end)
        if lane == len(lanes):
            lanes.append([])
            yield _named("thread_name", pid, _KERNELS + lane, "kernels")
        lanes[lane].append(end)
        yield _slice(kernel.name, start, end, {"pid": pid, "tid": _KERNELS + lane})


def _lane(lanes: Sequence[list[int]], start: int, end: int) -> int:
    """The first thread that can take a slice; one more than there are if none can."""
    for place, open_ends in enumerate(lanes):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        if not open_ends or end <= open_ends[-1]:
            return place
    return len(lanes)


def _slice(name: str, start_ns: int, end_ns: int, place: Event) -> Event:
    return {"name": name, "ph": "X", "ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3} | place


def _async(
    category: str, name: str, number: int, span: tuple[int, int], owner: tuple[int, Event]
) -> tuple[Event, Event]:
    """`span` in ns; `owner` is a process, and what there is to say. A trace begins at 0, also for
    what came before."""
    pid, args = owner
    both = {"cat": category, "name": name, "id": f"{category}-{number}", "pid": pid}
    both["tid"] = _TRANSFERS if category == "transfer" else 0
    start, end = (max(0, edge) for edge in span)
    return (
        both | {"ph": "b", "ts": start / 1e3, "args": args},
        both | {"ph": "e", "ts": max(start, end) / 1e3},
    )


def _counter(name: str, at_ns: int, pid: int, values: Event) -> Event:
    return {"name": name, "ph": "C", "ts": at_ns / 1e3, "pid": pid, "tid": 0, "args": values}


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}
