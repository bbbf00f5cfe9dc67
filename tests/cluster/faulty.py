"""Clusters whose workers have faults built around them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx

from splitserve.launch.launcher import Launcher
from splitserve.launch.local import MODULES, LocalSpawner
from splitserve.launch.plan import LaunchPlan
from splitserve.models import resolve_model
from splitserve.process import available_cores
from splitserve.settings import resolve
from tests.cluster.harness import TIMEOUT_S, Body, Ring, assert_port_free
from tests.faults.pace import DIRECTORY_ENV, Pace, PaceFile
from tests.tiny_models import make_tiny_llama
from tests.waiting import wait_until

WHOLE_S = 60.0  # for a cluster to have all its workers again
FAULTY_MODULES = {**MODULES, "prefill": "tests.faults.prefill", "decode": "tests.faults.decode"}
DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "port": 0,
    "log_level": "warning",
    "max_restarts": 1000,
    "num_threads": 1,
    "num_blocks": 256,
    "max_num_batched_tokens": 32,
}
TWO_EACH = {"prefill": 2, "decode": 2}  # what most files want, so that they can share it


@dataclasses.dataclass(frozen=True)
class FaultyRing(Ring):
    """A cluster whose coordinator and workers may die and come back."""

    pace: PaceFile
    launcher: Launcher

    def cluster(self) -> Body:
        """Also while the coordinator is away: then it is asked again."""
        seen: list[Body] = []

        def answers() -> bool:
            with contextlib.suppress(httpx.TransportError):
                seen.append(super(FaultyRing, self).cluster())
            return bool(seen)

        wait_until(answers, WHOLE_S, f"an answer to GET /cluster; {self.launcher.failure}")
        return seen[0]

    def pid_of(self, worker_id: str) -> int:
        return next(int(w["pid"]) for w in self.cluster()["workers"] if w["worker_id"] == worker_id)

    def coordinator_pid(self) -> int:
        return int(self.cluster()["coordinator"]["pid"])

    def ready(self, role: str) -> list[Body]:
        return [w for w in self.cluster()["workers"] if w["role"] == role and w["state"] == "ready"]

    def cluster_alive(self) -> list[Body]:
        return [w for w in self.cluster()["workers"] if w["state"] != "dead"]

    def is_whole(self, state: Body | None = None) -> bool:
        """Every worker that is wanted is ready, and no other process is there."""
        state = self.cluster() if state is None else state
        alive = [w for w in state["workers"] if w["state"] != "dead"]
        counts = {role: sum(w["role"] == role for w in alive) for role in state["target"]}
        all_ready = all(w["state"] == "ready" for w in alive)
        return bool(state["coordinator"]["ready"]) and all_ready and counts == state["target"]

    def wait_whole(self) -> None:
        wait_until(self.is_whole, WHOLE_S, "every worker ready again")

    def reset(self) -> None:
        """No faults any more; nothing may be held on the workers that live."""
        self.pace.write(**dataclasses.asdict(Pace()))
        self.pace.forget_marks()
        self.assert_drained()

    def wait_marked(self, tag: tuple[int, int], timeout_s: float = 10.0) -> Body:
        """Where a request is, once it is held there."""
        found: list[Body] = []

        def is_marked() -> bool:
            found.extend(mark for mark in self.pace.marks() if mark["tag"] == list(tag))
            return bool(found)

        wait_until(is_marked, timeout_s, f"request {tag} held at its point")
        return found[-1]


@contextlib.contextmanager
def faulty(
    model: Path,
    around: Callable[[Path], AbstractContextManager[object]] = contextlib.nullcontext,
    **flags: Any,
) -> Iterator[FaultyRing]:
    """Such a cluster. On exit, also after a failure, nothing of it may be left.

    `around` gets the directory of its faults, before the cluster starts and until it has ended.
    """
    shared_memory = set(os.listdir("/dev/shm"))
    with (
        tempfile.TemporaryDirectory(prefix="faults-") as name,
        _environment(name),
        around(Path(name)),
    ):
        settings = resolve({**DEFAULTS, "model": str(model), **flags})
        plan = LaunchPlan(
            settings=settings,
            model_dir=str(resolve_model(settings.model).directory),
            cores=available_cores(),
            parent_pid=os.getpid(),
        )
        launcher = Launcher(LocalSpawner(plan, modules=FAULTY_MODULES), settings)
        base_url = ""
        try:
            base_url = launcher.start()
            with httpx.Client(base_url=base_url, timeout=TIMEOUT_S, limits=_LIMITS) as http:
                yield FaultyRing(base_url, http, PaceFile(Path(name)), launcher)
                assert launcher.failure is None, launcher.failure
        finally:
            let_go(processes_of(name))  # a stopped one can't be asked to end
            launcher.stop()
            wait_until(lambda: not processes_of(name), 5, f"no process left of {name}")
            if base_url:
                assert_port_free(base_url)
            left = set(os.listdir("/dev/shm")) - shared_memory
            assert not left, f"shared memory is left behind: {left}"


_LIMITS = httpx.Limits(max_connections=256)


@contextlib.contextmanager
def tiny_faulty(**flags: Any) -> Iterator[FaultyRing]:
    """A faulty cluster with a tiny random model, made on the spot."""
    with tempfile.TemporaryDirectory(prefix="tiny-") as name:
        with faulty(make_tiny_llama(Path(name) / "model"), **flags) as ring:
            yield ring


@contextlib.contextmanager
def _environment(directory: str) -> Iterator[None]:
    """What workers started meanwhile find in their environment. One such cluster at a time."""
    assert DIRECTORY_ENV not in os.environ, "workers of two clusters would share one directory"
    os.environ[DIRECTORY_ENV] = directory
    try:
        yield
    finally:
        del os.environ[DIRECTORY_ENV]


def processes_of(directory: str) -> list[int]:
    """Every process started with this directory of faults, also those nobody speaks of any more."""
    wanted = f"{DIRECTORY_ENV}={directory}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid()]


def let_go(pids: list[int]) -> None:
    """Whoever is stopped goes on."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
