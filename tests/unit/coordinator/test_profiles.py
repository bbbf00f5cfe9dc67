"""POST /cluster/profile: what is asked of workers, and the lines that what they tell becomes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from coordinator.events import Send, SendFailed
from coordinator.profiles import GRACE_S, MAX_PROFILES, MAX_WAITING, Profiles
from splitserve.profiling.evidence import Evidence
from splitserve.profiling.step_log import COLUMNS
from splitserve.wire import messages as m
from tests.unit.coordinator.running import RunningCoordinator
from tests.unit.coordinator.scripted_worker import ScriptedWorker

Line = dict[str, Any]


@contextmanager
def profile(coordinator: RunningCoordinator, **body: Any) -> Iterator[Iterator[Line]]:
    """The lines of a profile as they come."""
    with coordinator.http.stream("POST", "/cluster/profile", json=body) as response:
        assert response.status_code == 200, response.read()
        yield map(json.loads, response.iter_lines())


def orders(worker: ScriptedWorker) -> list[m.Observe]:
    return [said for said in worker.received if isinstance(said, m.Observe)]


def observed(worker: ScriptedWorker, **changes: Any) -> m.Observed:
    values: dict[str, Any] = {"rows": (), "windows": (), "num_lost": 0, **changes}
    return m.Observed(worker.worker_id, worker.epoch, **values)


def is_over(worker: ScriptedWorker) -> bool:
    """Whether it was told to tell no more."""
    return bool(orders(worker)) and orders(worker)[-1].duration_s == 0


def next_of(lines: Iterator[Line], kind: str) -> Line:
    return next(line for line in lines if line["type"] == kind)


def test_workers_are_asked_for_steps_and_kernels(coordinator: RunningCoordinator) -> None:
    with profile(coordinator, duration_s=1, num_kernel_steps=3) as lines:
        start = next(lines)
        workers = coordinator.workers
        coordinator.wait(lambda: all(map(orders, workers)), "Observe")
        for worker in workers:
            assert orders(worker)[0] == m.Observe(worker.epoch, 1.0, 3)
        assert {w["worker_id"] for w in start["workers"]} == {w.worker_id for w in workers}
        for facts in start["workers"]:
            assert (facts["weight_bytes_per_number"], facts["num_cores"]) == (1, 16)
            layout = 2 * 2 * 2 * 32  # layers, keys and values, heads, numbers of one
            sizes = facts["kv_token_bytes"], facts["kv_int8_token_bytes"]
            assert sizes == (4 * layout, layout + 4 * layout // 32), "a scale a head"
        assert list(lines)[-1]["type"] == "end"


def test_kernels_become_seconds_since_the_start(coordinator: RunningCoordinator) -> None:
    worker = coordinator.workers[0]
    with profile(coordinator, duration_s=1) as lines:
        next(lines)
        coordinator.wait(lambda: bool(orders(worker)), "Observe")
        events = (m.KernelEvent("aten::mm", 0.0, 0.25), m.KernelEvent("aten::add", 1e-6, 0.5))
        worker.say(observed(worker, kernels=events, num_lost=5))
        kernels = next_of(lines, "kernels")
        assert kernels["worker_id"] == worker.worker_id
        (mm, mm_start_s, mm_s), (add, add_start_s, add_s) = kernels["events"]
        assert (mm, mm_s, add, add_s) == ("aten::mm", 0.25, "aten::add", 0.5)
        assert 0.0 <= mm_start_s <= 1.0
        assert mm_start_s - add_start_s == pytest.approx(1e-6, rel=1e-3)
        assert next_of(lines, "end")["num_lost"] == 5


@pytest.mark.parametrize("number", [-1, 21, 1.5, True, "3"])
def test_there_are_at_most_twenty_kernel_steps(
    coordinator: RunningCoordinator, number: object
) -> None:
    body = {"duration_s": 1, "num_kernel_steps": number}
    response = coordinator.http.post("/cluster/profile", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "num_kernel_steps"


def test_a_worker_that_joins_is_introduced_and_observed(empty: RunningCoordinator) -> None:
    empty.add("decode")
    empty.add("prefill")
    empty.wait_ready()
    with profile(empty, duration_s=2, num_kernel_steps=4) as lines:
        start = next(lines)
        late = empty.add("decode", num_cores=5)
        line = next_of(lines, "worker")
        empty.wait(lambda: bool(orders(late)), "Observe")
        late.say(observed(late, kernels=(m.KernelEvent("aten::mm", 0.0, 0.1),)))
        assert next_of(lines, "kernels")["worker_id"] == late.worker_id
        assert not [one for one in lines if one["type"] == "worker"], "once"
    assert line["worker_id"] == late.worker_id and line["num_cores"] == 5
    assert set(line) == {"type", *start["workers"][0]}
    order, *_ = orders(late)
    assert 0 < order.duration_s < 2 and order.num_kernel_steps == 4
    empty.wait(lambda: all(map(is_over, empty.workers)), "the end of observing")
    assert all(len(orders(worker)) == 2 for worker in empty.workers)


def test_a_client_that_leaves_ends_the_observing(coordinator: RunningCoordinator) -> None:
    with profile(coordinator, duration_s=600):
        coordinator.wait(lambda: not any(map(is_over, coordinator.workers)), "Observe")
    coordinator.wait(lambda: all(map(is_over, coordinator.workers)), "the end of observing")


def test_so_many_profiles_run_at_once(coordinator: RunningCoordinator) -> None:
    with ExitStack() as stack:
        running = [
            stack.enter_context(profile(coordinator, duration_s=600)) for _ in range(MAX_PROFILES)
        ]
        assert [next(lines)["type"] for lines in running] == ["start"] * MAX_PROFILES
        response = coordinator.http.post("/cluster/profile", json={"duration_s": 1})
        assert response.status_code == 429
        assert "4 profiles are running" in response.json()["error"]["message"]


def kernels(num: int) -> m.Observed:
    events = tuple(m.KernelEvent("aten::mm", 0.0, 0.1) for _ in range(num))
    return m.Observed("w", "e", (), (), 0, events)


def test_a_client_that_reads_slowly_gets_what_waits_and_hears_what_was_lost() -> None:
    """All of it was told within the profile's time; the client reads behind that."""
    now = 0.0
    profiles = Profiles(lambda: now)

    async def read() -> list[Line]:
        nonlocal now
        lines = profiles.lines(profiles.begin(m.Observe("e", 1.0), [], {}))
        start = await anext(lines)
        for _ in range(MAX_WAITING // 1000 + 3):
            profiles.observed(kernels(1000))
        now = 100.0
        return [start, *[line async for line in lines]]

    lines = asyncio.run(read())
    assert len(lines) == 2 + MAX_WAITING // 1000
    assert lines[-1]["num_lost"] == 3000


def step(age_s: float) -> tuple[float, ...]:
    """A row of the step log that ended so long ago."""
    return (age_s, *[0.0] * (len(COLUMNS) - 1))


def test_steps_from_before_a_profile_are_told_to_an_older_one_only() -> None:
    now = 0.0
    profiles = Profiles(lambda: now)
    older = profiles.begin(m.Observe("e", 60.0), [], {})
    now = 10.0
    younger = profiles.begin(m.Observe("e", 60.0), [], {})
    now = 12.0
    assert profiles.observed(m.Observed("w", "e", (step(3.0), step(1.0)), (), 0))
    told = [[row[0] for row in one.lines.get_nowait()["rows"]] for one in (older, younger)]
    assert told == [[9.0, 11.0], [1.0]]


def test_windows_and_kernels_from_before_a_profile_are_told_to_an_older_one_only() -> None:
    now = 0.0
    profiles = Profiles(lambda: now)
    older = profiles.begin(m.Observe("e", 60.0), [], {})
    now = 10.0
    younger = profiles.begin(m.Observe("e", 60.0), [], {})
    now = 12.0
    windows = tuple(m.ObservedWindow(age_s, Evidence()) for age_s in (3.0, 1.0))
    events = tuple(m.KernelEvent("aten::mm", age_s, 0.5) for age_s in (3.0, 1.0))
    assert profiles.observed(m.Observed("w", "e", (), windows, 0, events))
    for one, ages in ((older, [9.0, 11.0]), (younger, [1.0])):
        lines = [one.lines.get_nowait() for _ in range(one.lines.qsize())]
        assert [line["at"] for line in lines if line["type"] == "window"] == ages
        (told,) = [line["events"] for line in lines if line["type"] == "kernels"]
        assert [at for _, at, _ in told] == ages


def test_a_profile_that_does_not_begin_takes_no_place(
    coordinator: RunningCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, url = coordinator.server.service, f"{coordinator.url}/cluster/profile"
    send = service._send

    def broken(action: Send) -> SendFailed | None:
        if isinstance(action.message, m.Observe) and action.message.duration_s:
            raise RuntimeError("a fault was injected")
        return send(action)

    with monkeypatch.context() as patched:
        patched.setattr(service, "_send", broken)
        for _ in range(MAX_PROFILES):
            response = httpx.post(url, json={"duration_s": 600}, trust_env=False)
            assert response.status_code == 500
    with profile(coordinator, duration_s=1) as lines:
        assert next(lines)["type"] == "start"


def test_nobody_looks_when_the_time_is_over_however_slowly_a_client_reads() -> None:
    now = 0.0
    profiles = Profiles(lambda: now)
    long, short = (profiles.begin(m.Observe("e", s), [], {}) for s in (600.0, 1.0))
    assert not profiles.end(long), "the other one goes on"
    assert profiles.observed(kernels(1))
    now = 1.0 + GRACE_S
    assert not profiles.observed(kernels(1))
    assert profiles.end(short)


@pytest.mark.parametrize("num_turns", range(6))
def test_a_client_that_leaves_just_when_a_line_comes_is_not_missed(num_turns: int) -> None:
    """asyncio.wait_for, before Python 3.12, returns its result instead of being cancelled then."""

    async def leave() -> bool:
        profiles = Profiles(lambda: 0.0)
        profile = profiles.begin(m.Observe("e", 60.0), [], {})
        waiting = asyncio.create_task(profile.next(60.0))
        await asyncio.sleep(0.001)
        profiles.observed(kernels(1))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        was_waiting = waiting.cancel()
        await asyncio.wait([waiting])
        return waiting.cancelled() == was_waiting

    assert asyncio.run(leave())
