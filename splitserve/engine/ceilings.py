"""What this machine can do at most: measured at the first starts, and now and then again.

It is kept in the user's cache.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TextIO

import torch

from splitserve.config import user_cache_dir
from splitserve.engine.resolve import num_cores
from splitserve.work import Ceilings

logger = logging.getLogger(__name__)

# Raised whenever something is measured in another way.
_METHOD = 2
# Workers that start together, or beside something else, find too little.
_NUM_STARTS = 5
# It may have been busy at all of those.
_FRESH_S = 7 * 86_400.0
# Source and target together are well beyond the last-level cache of a few cores.
_COPY_BYTES = 128 << 20
_COPY_S = 0.1
# Rows and columns. Small ones do for few cores; many cores need large ones to be busy.
_MATMUL_SIZES = (512, 1024, 2048, 4096)
_MATMUL_S = 0.03  # for each size
_LONGEST_MATMUL_S = 0.004  # one that takes longer is large enough
# A measurement takes well under a second. Who was stopped during one must not stop the others.
_LOCK_TIMEOUT_S = 10.0
_LOCK_INTERVAL_S = 0.02


def ceilings(dtype: torch.dtype, num_threads: int, device: str) -> Ceilings:
    """What `measure` once found on this machine, or finds now.

    `num_threads` are torch's. Waits, up to 10 s, while another process measures: both at once
    would find too little. Where nothing can be kept, there is a warning, and each start measures.
    """
    assert device == "cpu" and num_threads == torch.get_num_threads(), (device, num_threads)
    path, key = cache_path(), _key(dtype, num_threads, device)
    now = time.time()
    found = _read(path).get(key)
    if found is not None and found.is_settled(now):
        return found.ceilings
    with _alone(path.with_suffix(".lock")) as alone:
        found = _read(path).get(key)  # of whoever had the lock before
        if found is not None and found.is_settled(now):
            return found.ceilings
        measured = _Kept(measure(dtype), 1, now).with_earlier(found)
        if alone:
            _keep(path, key, measured)
        return measured.ceilings


@dataclass(frozen=True, slots=True)
class _Kept:
    """The best of what so many starts measured: a busy machine shows too little."""

    ceilings: Ceilings
    num_starts: int
    measured_at: float = 0.0  # the last time, s since the epoch

    def is_settled(self, now: float) -> bool:
        """Whether there is nothing to measure. Of a time to come it is not known how old it is."""
        return self.num_starts >= _NUM_STARTS and 0 <= now - self.measured_at < _FRESH_S

    def with_earlier(self, kept: _Kept | None) -> _Kept:
        if kept is None:
            return self
        best = self.ceilings.highest(kept.ceilings)
        return _Kept(best, self.num_starts + kept.num_starts, self.measured_at)


def keep_achieved(
    achieved: Ceilings, weight_bytes: int, dtype: torch.dtype, num_threads: int, device: str
) -> None:
    """A worker was above the roofs, which become what it achieved. Waits for nobody.

    Weights that fit into the processor's cache are read faster than memory can be: the bytes of
    such a model say nothing of the machine.
    """
    path, key = cache_path(), _key(dtype, num_threads, device)
    with _alone(path.with_suffix(".lock"), timeout_s=0.0) as alone:
        found = _read(path).get(key)
        if found is None or not alone:
            return
        if weight_bytes < _COPY_BYTES:
            achieved = replace(achieved, bytes_per_s=found.ceilings.bytes_per_s)
        best = found.ceilings.highest(achieved)
        if best != found.ceilings:
            _keep(path, key, replace(found, ceilings=best))


def cache_path() -> Path:
    """Where ceilings are kept: in splitserve under XDG_CACHE_HOME or ~/.cache."""
    return user_cache_dir() / f"ceilings-v{_METHOD}.json"


@torch.inference_mode()
def measure(dtype: torch.dtype) -> Ceilings:
    """The copy bandwidth and the matmul peak of the CPU, with torch's present threads.

    The best of several repeats: whatever else runs can only slow them down. Takes about 0.3 s,
    and 256 MiB that are free again afterwards.
    """
    return Ceilings(_copy_bytes_per_s(), _matmul_flops_per_s(dtype))


def _copy_bytes_per_s() -> float:
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _shortest_s(partial(target.copy_, source), _COPY_S)


def _matmul_flops_per_s(dtype: torch.dtype) -> float:
    best = 0.0
    for size in _MATMUL_SIZES:
        a, b, product = torch.ones(3, size, size, dtype=dtype)
        shortest_s = _shortest_s(partial(torch.mm, a, b, out=product), _MATMUL_S)
        best = max(best, 2 * size**3 / shortest_s)
        if shortest_s > _LONGEST_MATMUL_S:
            break
    return best


def _shortest_s(run: Callable[[], object], time_s: float) -> float:
    """Of as many runs as fit into `time_s`, at least two.

    One before them counts not: it gets memory, and libraries set themselves up.
    """
    run()
    shortest_s, spent_s, num_runs = math.inf, 0.0, 0
    while spent_s < time_s or num_runs < 2:
        started_at = time.perf_counter()
        run()
        run_s = time.perf_counter() - started_at
        shortest_s, spent_s, num_runs = min(shortest_s, run_s), spent_s + run_s, num_runs + 1
    return shortest_s


def _key(dtype: torch.dtype, num_threads: int, device: str) -> str:
    name = str(dtype).removeprefix("torch.")
    counts = f"{num_cores()} cores, {num_threads} threads"
    return f"{_cpu_name()}, {counts}, {name}, torch {torch.__version__}, {device}"


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _read(path: Path) -> dict[str, _Kept]:
    """What is kept, by key; nothing of a file that makes no sense."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        found = {
            key: _Kept(
                Ceilings(**value["ceilings"]),
                int(value["num_starts"]),
                float(value.get("measured_at", 0.0)),
            )
            for key, value in kept.items()
        }
        numbers = [n for value in found.values() for n in asdict(value.ceilings).values()]
        if all(0 < n < math.inf for n in numbers):
            return found
    except (OSError, LookupError, ValueError, TypeError, AttributeError, RecursionError):
        pass  # it is measured and written anew
    return {}


def _keep(path: Path, key: str, measured: _Kept) -> None:
    """Add to the file, whole or not at all. The caller holds the lock."""
    kept = {**_read(path), key: measured}
    unfinished = path.with_suffix(".partial")
    try:
        unfinished.write_text(
            json.dumps({key: asdict(value) for key, value in kept.items()}, indent=2) + "\n",
            encoding="utf-8",
        )
        unfinished.rename(path)
    except OSError as error:
        _warn(error)


@contextmanager
def _alone(path: Path, timeout_s: float | None = None) -> Iterator[bool]:
    """Hold the file's lock, which the kernel takes back from the dead; or warn. Yields which."""
    timeout_s = _LOCK_TIMEOUT_S if timeout_s is None else timeout_s
    with ExitStack() as stack:
        held = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _wait_for_lock(stack.enter_context(path.open("w")), timeout_s)
            held = True
        except OSError as error:
            _warn(error)
        yield held


def _wait_for_lock(file: TextIO, timeout_s: float) -> None:
    """Raises TimeoutError. It polls: flock by itself has no deadline."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{file.name} is locked by another process") from None
        time.sleep(_LOCK_INTERVAL_S)


def _warn(error: OSError) -> None:
    logger.warning("this machine's ceilings are not kept, and measured at each start: %s", error)
