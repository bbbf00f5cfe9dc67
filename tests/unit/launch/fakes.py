"""Clusters of tiny real processes, which start in a fraction of a second."""

from __future__ import annotations

import os
import re
from pathlib import Path

from splitserve.launch.launcher import Launcher
from splitserve.launch.local import LocalSpawner
from splitserve.launch.plan import LaunchPlan
from splitserve.settings import resolve
from tests.waiting import wait_until

MODULES = {
    "coordinator": "tests.unit.launch.fake_coordinator",
    "prefill": "tests.unit.launch.fake_worker",
    "decode": "tests.unit.launch.fake_worker",
}


class FakeCluster:
    """Owns a launcher over fake roles, and the lines they print."""

    def __init__(
        self,
        ways: str,
        *,
        prefill: int = 1,
        decode: int = 1,
        timeout_s: float = 20,
        grace_s: float = 1.0,
        **given: float,
    ) -> None:
        given |= {"prefill": prefill, "decode": decode}
        given |= {"start_timeout_s": timeout_s, "stop_grace_s": grace_s}
        settings = resolve({"model": "fake", **given}, environ={})
        plan = LaunchPlan(settings, ways, cores=(), parent_pid=os.getpid())
        self.lines: list[str] = []
        spawner = LocalSpawner(plan, self._echo, MODULES)
        self.launcher = Launcher(spawner, settings)

    def _echo(self, launch_id: str, line: str) -> None:
        self.lines.append(f"[{launch_id}] {line}")

    def pids(self) -> list[int]:
        """Of the workers, in the order in which they came up."""
        return [int(found[1]) for line in self.lines if (found := re.search(r"pid (\d+)", line))]

    def coordinator_pids(self) -> list[int]:
        """Of every coordinator there was, the oldest first."""
        return [int(found[1]) for line in self.lines if (found := re.search(r"life (\d+)", line))]

    def wait_for_line(self, text: str, number: int = 1) -> str:
        """The line with this text: the first, or a later one."""

        def found() -> list[str]:
            return [line for line in self.lines if text in line]

        wait_until(lambda: len(found()) >= number, 10, f"line {number} with {text!r}")
        return found()[number - 1]


def is_running(pid: int) -> bool:
    """Whether a process exists and is more than a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
