"""Is anything else running on this machine? Benchmarks need it to themselves."""

from __future__ import annotations

import time
from pathlib import Path

_STAT = Path("/proc/stat")
_LOOK_S = 0.5


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
