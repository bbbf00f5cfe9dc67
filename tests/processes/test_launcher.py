from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from splitserve.errors import LaunchError
from splitserve.launch import local
from splitserve.launch.child import ChildProcess, ChildSpec, Exited
from splitserve.launch.local import ORPHAN_GRACE_S, LocalSpawner
from splitserve.launch.plan import LaunchPlan, WorkerPlace
from splitserve.launch.spawner import Inbox
from splitserve.settings import resolve
from tests.unit.launch.fakes import MODULES, FakeCluster, is_running
from tests.waiting import wait_until


def test_start_and_stop_leave_nothing() -> None:
    cluster = FakeCluster("well", prefill=2, decode=1)
    assert cluster.launcher.start() == "http://127.0.0.1:1"
    wait_until(lambda: len(cluster.pids()) == 3, 10, "three workers")
    assert all(is_running(pid) for pid in cluster.pids())
    cluster.launcher.stop()
    assert cluster.launcher.failure is None
    assert not any(is_running(pid) for pid in cluster.pids())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_worker_that_fails_to_start_is_named_with_its_last_words(role: str) -> None:
    # Reported as exo-explore/exo#1591: a crash in warm-up left the cluster "warming up" for ever.
    cluster = FakeCluster(f"{role}-dies")
    with pytest.raises(LaunchError) as failed:
        cluster.launcher.start()
    assert f"{role}-0" in str(failed.value)
    assert "exited with code 1" in str(failed.value)
    assert "shard 3 is corrupt" in str(failed.value)
    assert cluster.launcher.wait(5)
    assert not any(is_running(pid) for pid in cluster.pids())


def test_coordinator_that_fails_to_start_is_named() -> None:
    with pytest.raises(LaunchError, match=r"(?s)coordinator.*exited with code 1.*no such port"):
        FakeCluster("coordinator-dies").launcher.start()


def test_launcher_that_is_refused_fails() -> None:
    with pytest.raises(LaunchError, match="refused its launcher: no"):
        FakeCluster("rejects").launcher.start()


def test_start_has_a_deadline() -> None:
    started = time.monotonic()
    with pytest.raises(LaunchError, match=r"not ready within 1\.5 s.*decode-0"):
        FakeCluster("decode-hangs", timeout_s=1.5).launcher.start()
    assert time.monotonic() - started < 6


def test_worker_that_exits_later_is_reported_and_the_cluster_goes_on() -> None:
    cluster = FakeCluster("well", prefill=2)
    cluster.launcher.start()
    os.kill(_pid_in(cluster.wait_for_line("[prefill-0] cores")), signal.SIGTERM)
    cluster.wait_for_line("told prefill-0 exited -15")
    assert not cluster.launcher.wait(0)
    cluster.launcher.stop()
    assert cluster.launcher.failure is None


def test_killed_worker_is_replaced_in_its_slot_when_told() -> None:
    cluster = FakeCluster("replaces", prefill=2)
    cluster.launcher.start()
    line = cluster.wait_for_line("[prefill-0] cores")
    os.kill(_pid_in(line), signal.SIGKILL)
    cluster.wait_for_line("told prefill-0 exited -9")
    cluster.wait_for_line("[prefill-7] cores")
    assert cluster.launcher._places["prefill-7"].slot == 0
    cluster.launcher.stop()


def test_stop_message_ends_one_worker() -> None:
    cluster = FakeCluster("stops ignores-sigterm", prefill=1)
    cluster.launcher.start()
    os.kill(_pid_in(cluster.wait_for_line("[prefill-0] cores")), signal.SIGKILL)
    cluster.wait_for_line("told decode-0 exited -9")  # SIGTERM ignored, killed after the grace
    cluster.launcher.stop()


def test_sigterm_is_followed_by_sigkill_and_kill_needs_no_grace() -> None:
    cluster = FakeCluster("ignores-sigterm")
    cluster.launcher.start()
    started = time.monotonic()
    cluster.launcher.stop()
    assert 1.0 <= time.monotonic() - started < 5
    forced = FakeCluster("ignores-sigterm")
    forced.launcher.start()
    started = time.monotonic()
    forced.launcher.kill()
    assert forced.launcher.wait(5)
    assert time.monotonic() - started < 1.0
    assert not any(is_running(pid) for pid in cluster.pids() + forced.pids())


def test_the_coordinator_leaves_before_any_worker_is_told_to() -> None:
    cluster = FakeCluster("says-goodbye", prefill=2)
    cluster.launcher.start()
    cluster.launcher.stop()
    goodbyes = [line.split()[1] for line in cluster.lines if "says goodbye" in line]
    assert goodbyes == ["coordinator", *goodbyes[1:]]
    assert sorted(goodbyes[1:]) == ["decode", "prefill", "prefill"]


def test_a_worker_without_a_coordinator_is_not_waited_for_as_long_as_one_with() -> None:
    cluster = FakeCluster("ignores-sigterm", grace_s=60)
    cluster.launcher.start()
    started = time.monotonic()
    cluster.launcher.stop()
    assert time.monotonic() - started < ORPHAN_GRACE_S + 3
    assert not any(is_running(pid) for pid in cluster.pids())


def test_a_child_that_ends_while_it_is_started_leaves_no_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(ChildProcess):
        """Returns from its construction when its child has come, gone, and been told of."""

        def __init__(self, spec: ChildSpec, on_exit: Any, echo: Any) -> None:
            told = threading.Event()

            def tell(exited: Exited) -> None:
                on_exit(exited)
                told.set()

            super().__init__(spec, tell, echo)
            assert told.wait(10)

    monkeypatch.setattr(local, "ChildProcess", Slow)
    settings = resolve({"model": "fake"}, environ={})
    plan = LaunchPlan(settings, "prefill-dies", cores=(), parent_pid=os.getpid())
    spawner = LocalSpawner(plan, lambda *_: None, MODULES)
    spawner._inbox = inbox = Inbox()
    try:
        spawner.start(WorkerPlace("prefill", "prefill-0", 0), "tcp://127.0.0.1:1")
        assert spawner._workers == {}
        assert [type(event) for event in inbox.take()] == [Exited]
    finally:
        inbox.close()


def test_sigkill_of_the_launcher_leaves_nothing() -> None:
    script = """
        from tests.unit.launch.fakes import FakeCluster
        from tests.waiting import wait_until
        cluster = FakeCluster("ignores-sigterm", prefill=2)
        cluster.launcher.start()
        wait_until(lambda: len(cluster.pids()) == 3, 10, "workers")
        print(*cluster.pids(), flush=True)
        cluster.launcher.wait()
    """
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, cwd=root
    ) as launcher:
        assert launcher.stdout is not None
        pids = [int(word) for word in launcher.stdout.readline().split()]
        assert len(pids) == 3
        assert all(is_running(pid) for pid in pids)
        launcher.kill()
    wait_until(lambda: not any(is_running(pid) for pid in pids), 5, "end of the workers")


def _pid_in(line: str) -> int:
    found = re.search(r"pid (\d+)", line)
    assert found
    return int(found[1])
