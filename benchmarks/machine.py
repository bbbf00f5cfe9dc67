"""This machine: what it is, and whether anything else runs on it. Benchmarks need it alone."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import splitserve
from splitserve.process import num_usable_cores

_STAT = Path("/proc/stat")
_LOOK_S = 0.5
_GIT_S = 10.0
_PACKAGES = ("torch", "transformers", "numpy", "triton")


@dataclass(frozen=True, slots=True)
class Process:
    """A process as Linux shows it. Its time is that of its children too, once it waited for
    them."""

    pid: int
    session_id: int
    is_alive: bool
    jiffies: int


def processes() -> Iterator[Process]:
    """All there are at present (Linux; elsewhere none)."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            fields = entry.read_text().rpartition(")")[2].split()  # from the third on, proc(5)
            jiffies = sum(int(field) for field in fields[11:15])
            yield Process(int(entry.parent.name), int(fields[3]), fields[0] not in "ZX", jiffies)


def busy_share() -> float:
    """The share of all cores' time that is in use at present; 0 where Linux does not tell."""
    if not _STAT.exists():
        return 0.0
    busy_before, all_before = _jiffies(_STAT.read_text())
    time.sleep(_LOOK_S)
    busy_after, all_after = _jiffies(_STAT.read_text())
    return (busy_after - busy_before) / max(1, all_after - all_before)


def _jiffies(stat: str) -> tuple[int, int]:
    """Busy ones and all, since boot: user, nice, system, idle, iowait, irq, softirq, steal."""
    fields = [int(field) for field in stat.splitlines()[0].split()[1:9]]
    return sum(fields) - fields[3] - fields[4], sum(fields)


@dataclass(frozen=True, slots=True)
class Look:
    """Jiffies since boot: of this process and a session of others, of all cores busy, of all."""

    ours: int
    busy: int
    total: int


def look(session_id: int) -> Look | None:
    """The machine now; None where Linux does not tell."""
    if not _STAT.exists():
        return None
    me = os.getpid()
    found = [one for one in processes() if one.pid == me or one.session_id == session_id]
    return Look(sum(one.jiffies for one in found), *_jiffies(_STAT.read_text()))


def others_share(before: Look, after: Look) -> float:
    """Of all cores' time between two looks, what neither this process nor the session used.

    A process that left its session, or that nobody in it waited for, counts as others.
    """
    used = (after.busy - before.busy) - (after.ours - before.ours)
    return max(0.0, used / max(1, after.total - before.total))


class OthersWatch:
    """Owns the look at the begin of what is measured."""

    def __init__(self, session_id: int) -> None:
        self._session_id = session_id
        self._before: Look | None = None

    def start(self) -> None:
        self._before = look(self._session_id)

    def share(self) -> float | None:
        """Used by others since the start; None where it was not started, or Linux does not tell."""
        after = look(self._session_id)
        if self._before is None or after is None:
            return None
        return others_share(self._before, after)


def facts() -> dict[str, object]:
    """What a reader needs to measure the same again, for a JSON file."""
    return {
        "cpu": _value_in(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "num_cores": os.cpu_count(),
        "num_usable_cores": num_usable_cores(),
        "memory": _value_in(Path("/proc/meminfo"), "MemTotal"),
        "gpus": [
            _value_in(path, "Model")
            for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        ],
        "system": platform.platform(),
        "python": platform.python_version(),
        "splitserve": {"version": splitserve.__version__, "commit": _commit()},
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _value_in(path: Path, name: str) -> str | None:
    """Of the first line `name: value`."""
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _commit() -> str | None:
    """Of the code that runs, "-dirty" where it was changed since; None outside a checkout."""
    folder = Path(splitserve.__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
