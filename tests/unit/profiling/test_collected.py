from __future__ import annotations

import dataclasses
import io
import itertools
import json
from typing import Any

import numpy as np
import pytest

from splitserve.errors import RequestFailedError, StreamBrokenError
from splitserve.profiling.collected import LIMITS, Collector
from splitserve.profiling.evidence import Evidence
from splitserve.profiling.step_log import COLUMNS
from splitserve.profiling.trace import write_trace
from tests.unit.profiling.profiles import profile_of
from tests.unit.profiling.recorded import DECODE_BOUND, PREFILL_BOUND, facts, lines, stream

START: dict[str, Any] = {
    "type": "start",
    "duration_s": 5,
    "model": "m",
    "target": {"prefill": 1, "decode": 1},
    "columns": list(COLUMNS),
    "workers": [facts("decode-0-aa", "decode")],
}


def encoded(*messages: Any) -> bytes:
    return b"".join(json.dumps(message).encode() + b"\n" for message in messages)


def window(**evidence: Any) -> dict[str, Any]:
    return {"type": "window", "worker_id": "decode-0-aa", "at": 1.0, "evidence": evidence}


@pytest.mark.parametrize("load", [PREFILL_BOUND, DECODE_BOUND], ids=["1P1D", "2P2D"])
def test_all_that_was_sent_is_there(load: Any) -> None:
    sent = list(lines(load))
    profile = profile_of(load)
    assert profile.is_whole
    assert (profile.num_dropped, profile.num_unreadable) == (0, 0)
    assert profile.asked_s == load.duration_s <= profile.observed_s
    for worker in profile.workers:
        own = [line for line in sent if line.get("worker_id") == worker.facts.worker_id]
        rows = [row for line in own if line["type"] == "steps" for row in line["rows"]]
        assert worker.steps.tolist() == [tuple(row) for row in rows]
        told = [line["evidence"] for line in own if line["type"] == "window"]
        assert [dataclasses.asdict(w.evidence) for w in worker.windows] == told
    assert len(profile.requests) == sum(line["type"] == "request" for line in sent) > 0


def test_where_bytes_are_cut_does_not_matter() -> None:
    data = stream(PREFILL_BOUND)
    collector = Collector()
    for start in range(0, len(data), 997):
        collector.feed(data[start : start + 997])
    whole = profile_of(PREFILL_BOUND)
    assert collector.profile().requests == whole.requests
    assert [w.windows for w in collector.profile().workers] == [w.windows for w in whole.workers]


def test_a_stream_that_is_cut_keeps_what_came() -> None:
    data = stream(PREFILL_BOUND)
    collector = Collector()
    collector.feed(data[: len(data) // 2])
    profile = collector.profile()
    assert not profile.is_whole
    assert profile.num_unreadable == 1  # the line that was cut
    assert 0 < sum(len(worker.steps) for worker in profile.workers)
    assert profile.observed_s < PREFILL_BOUND.duration_s


def test_workers_that_leave_and_join_midway() -> None:
    load = dataclasses.replace(DECODE_BOUND, leaves_at=4.0, joins_at=5.0)
    workers = profile_of(load).workers
    left, joined = workers[3], workers[4]
    assert 3.0 < left.windows[-1].at < 5.0
    assert joined.windows[0].at > 5.0
    assert joined.facts.worker_id not in {
        w.facts.worker_id for w in profile_of(DECODE_BOUND).workers
    }
    assert dataclasses.replace(joined.facts, worker_id="") == dataclasses.replace(
        workers[2].facts, worker_id=""
    )


def test_a_worker_that_nobody_introduced_has_a_role_and_no_roofs() -> None:
    collector = Collector()
    collector.feed(encoded(START, {**window(), "worker_id": "prefill-7-ff"}))
    stranger = collector.profile().workers[1].facts
    assert (stranger.role, stranger.bytes_per_s, stranger.num_cores) == ("prefill", 0.0, 0)


def test_unknown_lines_and_fields_are_ignored_and_bad_ones_counted() -> None:
    collector = Collector()
    collector.feed(encoded(START, {"type": "weather", "is": "fine"}))
    collector.feed(b'{"type": "steps", "worker_\n[1]\nnull\n\n')
    collector.feed(encoded({"type": "steps", "worker_id": "x", "rows": [[1.0], [1.0, 2.0]]}))
    collector.feed(encoded({"type": "steps", "worker_id": "x", "rows": 7}, {"type": "window"}))
    collector.feed(encoded(window(window_s=2.0, invented=7, bottleneck="gremlins")))
    profile = collector.profile()
    assert profile.num_unreadable == 6
    evidence = profile.workers[0].windows[0].evidence
    assert evidence == Evidence(window_s=2.0, bottleneck="idle")  # decided anew


def test_columns_go_by_name_and_may_be_missing() -> None:
    collector = Collector()
    collector.feed(encoded({**START, "columns": ["num_flops", "new", "ended_at", "wait_s"]}))
    rows = [[10, 1, 0.5, None], [1e300, 2, 0.7, 0.1]]
    collector.feed(encoded({"type": "steps", "worker_id": "decode-0-aa", "rows": rows}))
    steps = collector.profile().workers[0].steps
    assert list(steps["ended_at"]) == [0.5, 0.7]
    assert list(steps["wait_s"]) == [0.0, 0.1]
    assert steps["num_flops"][0] == 10
    assert steps["num_flops"][1] > 0  # the largest there is, not what wraps around
    assert not np.any(steps["forward_s"])


def test_a_window_told_twice_counts_once() -> None:
    collector = Collector()
    collector.feed(encoded(START, window(window=3), window(window=3), window(window=4)))
    assert len(collector.profile().workers[0].windows) == 2


def test_memory_has_a_bound() -> None:
    collector = Collector({**LIMITS, "steps": 100, "request": 3})
    collector.feed(stream(PREFILL_BOUND))
    profile, whole = collector.profile(), profile_of(PREFILL_BOUND)
    assert sum(len(worker.steps) for worker in profile.workers) == 100
    assert len(profile.requests) == 3
    num_left_out = sum(len(w.steps) for w in whole.workers) - 100 + len(whole.requests) - 3
    assert profile.num_dropped == num_left_out


def test_what_the_cluster_lost_is_told() -> None:
    collector = Collector()
    collector.feed(encoded(START, {"type": "end", "at": 5.0, "num_lost": 12}))
    assert collector.profile().num_dropped == 12


def test_an_error_line_is_an_error_and_what_came_stays() -> None:
    collector = Collector()
    with pytest.raises(RequestFailedError, match="the coordinator shuts down"):
        collector.feed(
            encoded(START, window(), {"error": {"message": "the coordinator shuts down"}})
        )
    assert len(collector.profile().workers[0].windows) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"<html>\n",
        b"[]\n",
        b'{"type": "end", "at": 1}\n',
        b'{"type": "start", "workers": 3}\n',
        b'{"type": "start", "workers": [{}]}\n',
    ],
)
def test_what_is_no_profile_is_refused(data: bytes) -> None:
    with pytest.raises(StreamBrokenError, match="sends no profile"):
        Collector().feed(data)


def test_nothing_at_all_is_no_profile() -> None:
    with pytest.raises(StreamBrokenError, match="before it began"):
        Collector().profile()


def test_stages_follow_each_other_and_fill_the_request() -> None:
    for request in profile_of(PREFILL_BOUND).requests:
        stages = request.stages()
        assert [stage.name for stage in stages][:2] == ["queue", "prefill"]
        for before, after in itertools.pairwise(stages):
            assert after.start_s == pytest.approx(before.start_s + before.duration_s)
        assert sum(stage.duration_s for stage in stages) == pytest.approx(request.e2e_s)


@pytest.mark.parametrize(
    "number",
    [1e308, -1e308, 10**400, float("inf"), float("nan"), "1", True],
    ids=lambda number: repr(number)[:8],
)
def test_a_number_that_nothing_measures_is_none(number: Any) -> None:
    """Sums and products of the largest floats are infinite, and no trace can show those."""
    collector = Collector()
    collector.feed(encoded({**START, "duration_s": number, "target": {"decode": number}}))
    collector.feed(encoded({"type": "request", "at": number, "timing": {"e2e_s": number}}))
    rows = [[number if name == "ended_at" else 0 for name in COLUMNS]]
    if isinstance(number, float):
        collector.feed(encoded({"type": "steps", "worker_id": "decode-0-aa", "rows": rows}))
    profile = collector.profile()
    assert (profile.asked_s, profile.target, profile.num_unreadable) == (0.0, {"decode": 0}, 0)
    assert [(request.at, request.e2e_s) for request in profile.requests] == [(0.0, 0.0)]
    write_trace(profile, io.StringIO())


def test_names_are_short_and_can_be_shown() -> None:
    """Half a surrogate pair can't be printed, and a terminal obeys escapes."""
    collector = Collector()
    collector.feed(
        encoded({**START, "model": "\ud800", "workers": [facts("a\x1b[2J\nb", "decode")]})
    )
    kernels = {"type": "kernels", "worker_id": "\udfff", "events": [["k" * 500, 0.0, 0.1]]}
    collector.feed(encoded(kernels))
    profile = collector.profile()
    assert profile.model == "?"
    assert [worker.facts.worker_id for worker in profile.workers] == ["a?[2J?b", "?"]
    assert profile.workers[1].kernels[0].name == "k" * 200


def test_a_roof_that_a_worker_has_raised_meanwhile_is_raised_here() -> None:
    """Its facts are those of its start; no dot may lie above the roof that is drawn."""
    collector = Collector()
    worker = {**facts("decode-0-aa", "decode"), "bytes_per_s": 1e9, "flops_per_s": 1e12}
    beyond = {"num_bytes": 4e9, "memory_floor_s": 2.0, "forward_s": 2.0, "floor_s": 2.0}
    below = {"num_flops": 1e12, "compute_floor_s": 1.0, "forward_s": 4.0, "floor_s": 1.0}
    collector.feed(encoded({**START, "workers": [worker]}, window(**beyond), window(**below)))
    found = collector.profile().workers[0].facts
    assert (found.bytes_per_s, found.flops_per_s) == (2e9, 1e12)
