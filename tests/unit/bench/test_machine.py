from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.machine import Look, OthersWatch, facts, look, others_share, processes
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="Linux tells, no other")

# Works in a child, so that a session is more than its first process.
BUSY = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "print(flush=True)\\nwhile True: pass"])
"""


@contextmanager
def busy_session() -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield process.pid
    finally:
        for one in processes():
            if one.session_id == process.pid:
                subprocess.run(["kill", "-9", str(one.pid)], check=False)
        process.wait()
        process.stdout.close()


def used_by(session_id: int) -> int:
    return sum(one.jiffies for one in processes() if one.session_id == session_id)


def ours(session_id: int) -> int:
    seen = look(session_id)
    assert seen is not None
    return seen.ours


def wait_for_work(session_id: int, num_jiffies: int) -> None:
    goal = used_by(session_id) + num_jiffies
    wait_until(lambda: used_by(session_id) >= goal, 60, "work of the session")


def test_the_work_of_a_whole_session_is_ours_and_no_other() -> None:
    with busy_session() as session_id:
        before = ours(session_id) - ours(-1)
        wait_for_work(session_id, 50)
        assert ours(session_id) - ours(-1) - before >= 40


def test_the_work_of_this_process_is_ours() -> None:
    before, until_s = ours(-1), time.process_time() + 0.5
    while time.process_time() < until_s:
        pass
    assert ours(-1) - before >= 40


def test_a_watch_sees_what_is_not_ours() -> None:
    with busy_session() as session_id:
        watch = OthersWatch(-1)
        watch.start()
        wait_for_work(session_id, 50)
        share = watch.share()
    assert share is not None and share > 0


def test_the_share_of_others_is_what_is_left() -> None:
    before = Look(ours=100, busy=1000, total=5000)
    assert others_share(before, Look(ours=350, busy=1300, total=5400)) == 0.125
    assert others_share(before, Look(ours=401, busy=1300, total=5400)) == 0  # ticks are coarse


def test_a_watch_that_was_not_started_knows_nothing() -> None:
    assert OthersWatch(-1).share() is None


def test_facts_name_the_machine_and_what_runs() -> None:
    found = json.loads(json.dumps(facts()))
    assert found["cpu"] and found["num_cores"] >= found["num_usable_cores"] >= 1
    assert found["splitserve"]["version"] and found["packages"]["torch"]
