"""The death of a coordinator, and its return, with real processes."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from splitserve.errors import LaunchError
from tests.unit.launch.fakes import FakeCluster, is_running
from tests.waiting import wait_until


@contextmanager
def up(ways: str = "well", **given: float) -> Iterator[FakeCluster]:
    """A cluster that is ready, with all its workers' pids known; stopped at the end."""
    cluster = FakeCluster(ways, prefill=2, **given)  # type: ignore[arg-type]
    try:
        cluster.launcher.start()
        wait_until(lambda: len(cluster.pids()) == 3, 10, "three workers")
        yield cluster
    finally:
        cluster.launcher.kill()
        assert cluster.launcher.wait(10)


def lives(cluster: FakeCluster, number: int) -> str:
    """The line with which a coordinator, counted from 1, says what it was told."""
    return cluster.wait_for_line("] life ", number)


def kill_coordinator(cluster: FakeCluster, number: int = signal.SIGKILL) -> None:
    os.kill(cluster.coordinator_pids()[-1], number)


def test_killed_coordinator_is_back_at_its_ports_and_the_workers_stay() -> None:
    """As reported in kvcache-ai/Mooncake#2246 and ai-dynamo/nixl#795: what only the restarted
    process knew was lost, and its peers went on with its old address."""
    with up() as cluster:
        pids = cluster.pids()
        control = re.search(r"control (\d+)", lives(cluster, 1))
        started = time.monotonic()
        kill_coordinator(cluster)
        again = lives(cluster, 2)
        assert time.monotonic() - started < 5
        assert control
        assert f"http 1 control {control[1]} wants 3+4 True" in again  # as Ready and Targets said
        cluster.wait_for_line("told of ['decode-0', 'prefill-0', 'prefill-1']")
        assert cluster.pids() == pids
        assert all(is_running(pid) for pid in pids)
        assert cluster.launcher.failure is None


def test_worker_that_dies_after_the_return_is_reported_and_one_that_died_before_is_not_listed() -> (
    None
):
    with up() as cluster:
        kill_coordinator(cluster, signal.SIGSTOP)  # it can't hear of the worker's end
        os.kill(_pid_of(cluster, "prefill-1"), signal.SIGKILL)
        wait_until(lambda: "prefill-1" not in cluster.launcher._places, 5, "the worker's end")
        kill_coordinator(cluster)
        cluster.wait_for_line("told of ['decode-0', 'prefill-0']")
        os.kill(_pid_of(cluster, "prefill-0"), signal.SIGKILL)
        cluster.wait_for_line("told prefill-0 exited -9")


def test_frozen_coordinator_is_killed_and_replaced() -> None:
    with up(heartbeat_interval_s=0.1, heartbeat_timeout_s=1) as cluster:
        first = cluster.coordinator_pids()[0]
        os.kill(first, signal.SIGSTOP)
        started = time.monotonic()
        wait_until(lambda: not is_running(first), 5, "the end of the frozen coordinator")
        assert time.monotonic() - started > 0.9
        lives(cluster, 2)
        assert cluster.launcher.failure is None


def test_coordinator_that_answers_is_left_alone() -> None:
    with up(heartbeat_interval_s=0.05, heartbeat_timeout_s=1) as cluster:
        life = cluster.launcher._coordinator
        beats, beat = [], life._beat

        def counted(now: float) -> None:
            beats.append(now)
            beat(now)

        life._beat = counted  # type: ignore[method-assign]
        wait_until(lambda: len(beats) > 30, 10, "beats for longer than the timeout")
        assert is_running(cluster.coordinator_pids()[0])


def test_a_coordinator_that_comes_back_frozen_or_not_at_all_counts_as_a_failed_restart() -> None:
    with up("successor-hangs", max_restarts=1, timeout_s=1) as cluster:
        kill_coordinator(cluster)
        assert cluster.launcher.wait(15)
        assert "the coordinator ended 2 times" in str(cluster.launcher.failure)


def test_crash_loop_ends_after_the_limit_and_the_first_end_is_still_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As reported in gpustack/gpustack#6019: a loop of restarts hid the first failure's log."""
    with up("successor-dies", max_restarts=2) as cluster:
        pids = cluster.pids()
        kill_coordinator(cluster, signal.SIGSEGV)
        assert cluster.launcher.wait(15)
        failure = cluster.launcher.failure
        assert isinstance(failure, LaunchError)
        assert "the coordinator ended 3 times" in str(failure)
        assert "was killed by SIGSEGV" in str(failure)
        assert "no luck with" in str(failure)
        assert not any(is_running(pid) for pid in pids)
    assert "is started again in 0.5 s" in caplog.text
    assert "is started again in 1 s" in caplog.text


def test_no_restart_at_all_when_none_is_allowed() -> None:
    with up(max_restarts=0) as cluster:
        kill_coordinator(cluster)
        assert cluster.launcher.wait(10)
        assert "the coordinator ended once and is given up" in str(cluster.launcher.failure)
        assert len(cluster.coordinator_pids()) == 1


def test_a_coordinator_that_comes_back_hears_who_is_leaving() -> None:
    """Else it would count anew, and give a name twice."""
    with up("ignores-sigterm stops-first") as cluster:
        wait_until(lambda: "prefill-0" in cluster.launcher._stopping, 5, "Stop")
        kill_coordinator(cluster)
        cluster.wait_for_line("told of ['decode-0', 'prefill-0, leaving', 'prefill-1']")
        cluster.wait_for_line("told prefill-0 exited -9")


def test_stop_while_the_coordinator_is_gone() -> None:
    with up(grace_s=0.5) as cluster:
        kill_coordinator(cluster)
        wait_until(lambda: cluster.launcher._coordinator.socket is None, 5, "its end")
        cluster.launcher.stop()
        assert cluster.launcher.wait(0)
        assert cluster.launcher.failure is None
        assert len(cluster.coordinator_pids()) == 1
        assert not any(is_running(pid) for pid in cluster.pids())


def _pid_of(cluster: FakeCluster, launch_id: str) -> int:
    """Of the latest process of that name."""
    lines = [line for line in cluster.lines if line.startswith(f"[{launch_id}] cores")]
    found = re.search(r"pid (\d+)", lines[-1])
    assert found
    return int(found[1])
