"""What the Trace Event Format demands of each event, and what ours must say."""

from __future__ import annotations

import dataclasses
import io
import json
from collections import defaultdict
from typing import Any

import pytest

from splitserve.profiling.collected import Profile
from splitserve.profiling.entries import Kernel
from splitserve.profiling.trace import write_trace
from tests.unit.profiling.profiles import profile_of
from tests.unit.profiling.recorded import DECODE_BOUND, PREFILL_BOUND

Event = dict[str, Any]
FIELDS = {
    "X": {"name", "ph", "ts", "dur", "pid", "tid"},
    "b": {"name", "ph", "ts", "cat", "id", "pid", "tid"},
    "e": {"name", "ph", "ts", "cat", "id", "pid", "tid"},
    "C": {"name", "ph", "ts", "pid", "args"},
    "M": {"name", "ph", "pid", "tid", "args"},
}
LOADS = [
    dataclasses.replace(PREFILL_BOUND, num_kernel_steps=2),
    dataclasses.replace(DECODE_BOUND, joins_at=4.0, leaves_at=6.0),
]


def events_of(profile: Profile) -> list[Event]:
    file = io.StringIO()
    write_trace(profile, file)
    events: list[Event] = json.loads(file.getvalue())["traceEvents"]
    return events


def slices_by_thread(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    return threads


def depth_of_nesting(slices: list[Event]) -> int:
    """The deepest stack; AssertionError where a slice ends after the one it began in."""
    deepest, stack = 0, list[float]()
    for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
        end = round(event["ts"] + event["dur"], 3)
        while stack and stack[-1] <= event["ts"]:
            stack.pop()
        assert not stack or end <= stack[-1], event
        stack.append(end)
        deepest = max(deepest, len(stack))
    return deepest


@pytest.fixture(scope="module", params=LOADS, ids=["1P1D", "2P2D"])
def profile(request: pytest.FixtureRequest) -> Profile:
    return profile_of(request.param)


@pytest.fixture(scope="module")
def events(profile: Profile) -> list[Event]:
    return events_of(profile)


def test_every_event_has_what_the_format_demands(events: list[Event]) -> None:
    for event in events:
        assert FIELDS[event["ph"]] <= set(event), event
        assert event.get("dur", 0) >= 0
        assert event["ts"] >= 0
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
    assert {event["ph"] for event in events} == set(FIELDS)


def test_slices_nest_and_steps_hold_their_phases(events: list[Event], profile: Profile) -> None:
    threads = slices_by_thread(events)
    assert len(threads) >= len(profile.workers)
    for slices in threads.values():
        assert depth_of_nesting(slices) <= 2
    steps = [event for event in events if event["name"] == "step"]
    assert len(steps) == sum(len(worker.steps) for worker in profile.workers)


def test_times_are_microseconds_and_waits_are_blank(profile: Profile) -> None:
    events = events_of(profile)
    worker = profile.workers[0]
    steps = [e for e in events if e["name"] == "step" and e["pid"] == 2]
    for event, row in zip(steps, worker.steps, strict=True):
        assert event["ts"] + event["dur"] == pytest.approx(1e6 * row["ended_at"], abs=0.01)
    busy_s = sum(w.evidence.busy_s for w in worker.windows)
    shown_s = sum(
        event["dur"] for event in steps[: sum(w.evidence.num_steps for w in worker.windows)]
    )
    assert shown_s / 1e6 == pytest.approx(busy_s, rel=1e-6)


def test_processes_are_named_after_workers(events: list[Event], profile: Profile) -> None:
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [names[pid] for pid in sorted(names)][1:] == [
        worker.facts.worker_id for worker in profile.workers
    ]
    assert {event["pid"] for event in events} == set(names)


def test_requests_and_transfers_begin_and_end_in_order(
    events: list[Event], profile: Profile
) -> None:
    spans = defaultdict(list)
    for event in events:
        if event["ph"] in "be":
            spans[event["cat"], event["id"]].append(event)
    for own in spans.values():
        stack = []
        assert [e["ts"] for e in own] == sorted(e["ts"] for e in own)
        for event in own:
            if event["ph"] == "b":
                stack.append(event["name"])
            else:
                assert stack.pop() == event["name"]
        assert not stack
    kinds = [category for category, _ in spans]
    assert kinds.count("request") == kinds.count("transfer") == len(profile.requests)


def test_counters_say_slots_blocks_and_bandwidth(events: list[Event]) -> None:
    names = {event["name"] for event in events if event["ph"] == "C"}
    assert names == {"batch slots", "KV blocks", "achieved bandwidth, %"}
    shares = [e["args"]["of peak"] for e in events if e["name"] == "achieved bandwidth, %"]
    assert 0 < max(shares) <= 100


def test_kernels_that_overlap_go_to_other_threads() -> None:
    profile = profile_of(PREFILL_BOUND)
    kernels = (
        Kernel("outer", 1.0, 0.5),
        Kernel("inner", 1.1, 0.1),
        Kernel("across", 1.4, 0.5),
        Kernel("later", 2.0, 0.1),
    )
    worker = dataclasses.replace(profile.workers[0], kernels=kernels)
    events = events_of(dataclasses.replace(profile, workers=(worker,), requests=()))
    threads = {e["name"]: e["tid"] for e in events if e["ph"] == "X" and e["tid"] >= 3}
    assert threads == {"outer": 3, "inner": 3, "across": 4, "later": 3}
    for slices in slices_by_thread(events).values():
        assert depth_of_nesting(slices) == 2 or len(slices) == 1


def test_what_began_before_the_profile_begins_with_it() -> None:
    profile = profile_of(PREFILL_BOUND)
    early = dataclasses.replace(profile.requests[0], at=-0.3)
    events = events_of(dataclasses.replace(profile, requests=(early,), workers=()))
    assert min(event["ts"] for event in events) == 0
    assert events[-1]["ts"] == pytest.approx(1e6 * (early.e2e_s - 0.3), abs=1)
