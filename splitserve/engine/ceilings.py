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

# Raised whenever something is measured, or kept, in another way.
_METHOD = 3
# Workers that start together, or beside something else, find too little.
_NUM_STARTS = 5
# It may have been busy at all of those.
_FRESH_S = 7 * 86_400.0
# Source and target together are well beyond the last-level cache of a few cores.
_COPY_BYTES = 128 << 20
_GPU_COPY_BYTES = 256 << 20  # the caches of a GPU are larger
_COPY_S = 0.1
# Rows and columns. Small ones do for few cores; many cores need large ones to be busy.
_MATMUL_SIZES = (512, 1024, 2048, 4096)
_GPU_MATMUL_SIZES = (2048, 4096, 8192)
_MATMUL_S = 0.03  # for each size
_LONGEST_MATMUL_S = 0.004  # one that takes longer is large enough
# A worker writes down what it achieved in its loop: only what is more by so much, so seldom.
_WORTH_KEEPING = 1.02
_KEEP_INTERVAL_S = 60.0
# A measurement takes well under a second. Who was stopped during one must not stop the others.
_LOCK_TIMEOUT_S = 10.0
_LOCK_INTERVAL_S = 0.02


def ceilings(dtype: torch.dtype, num_threads: int, device: str) -> Ceilings:
    """What `measure` once found on this machine, or finds now.

    `num_threads` are torch's. Waits, up to 10 s, while another process measures: both at once
    would find too little. Where nothing can be kept, there is a warning, and each start measures.
    """
    assert num_threads == torch.get_num_threads(), num_threads
    path, key = cache_path(), _key(dtype, num_threads, device)
    now = time.time()
    found = _read(path).get(key)
    if found is not None and found.is_settled(now):
        return found.best
    with _alone(path.with_suffix(".lock")) as alone:
        found = _read(path).get(key)  # of whoever had the lock before
        if found is not None and found.is_settled(now):
            return found.best
        measured = _Kept(measure(dtype, device), 1, now).with_earlier(found)
        if alone:
            try:
                _keep(path, key, measured)
            except OSError as error:
                _warn(error)
        return measured.best


@dataclass(frozen=True, slots=True)
class _Kept:
    """The best of what so many starts measured: a busy machine shows too little. And what workers
    achieved since then, if that was more."""

    ceilings: Ceilings
    num_starts: int
    measured_at: float = 0.0  # the last time, s since the epoch
    achieved: Ceilings | None = None

    @property
    def best(self) -> Ceilings:
        return self.ceilings if self.achieved is None else self.ceilings.highest(self.achieved)

    def is_settled(self, now: float) -> bool:
        """Whether there is nothing to measure. Of a time to come it is not known how old it is."""
        return self.num_starts >= _NUM_STARTS and 0 <= now - self.measured_at < _FRESH_S

    def with_earlier(self, kept: _Kept | None) -> _Kept:
        """What was achieved goes with measurements of a week ago: it was but one window."""
        if kept is None:
            return self
        best = self.ceilings.highest(kept.ceilings)
        is_recent = 0 <= self.measured_at - kept.measured_at < _FRESH_S
        achieved = kept.achieved if is_recent else None
        return _Kept(best, self.num_starts + kept.num_starts, self.measured_at, achieved)


class Achieved:
    """Owns what is known of a worker that beat its roofs, and when some of it was last kept."""

    def __init__(
        self,
        roofs: Ceilings,
        weight_bytes: int,
        keep: Callable[[Ceilings], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`roofs` are those that it began with. `keep` writes, and is called in its loop."""
        self._roofs = roofs
        self._has_large_weights = weight_bytes >= _COPY_BYTES
        self._keep = keep
        self._clock = clock
        self._next_at = -math.inf

    def raised(self, roofs: Ceilings) -> None:
        """Keeps them, if it is time and they are worth it; else they come with the next ones.

        Weights that fit into the processor's cache are read faster than memory can be: the bytes
        of such a model say nothing of the machine.
        """
        if not self._has_large_weights:
            roofs = replace(roofs, bytes_per_s=self._roofs.bytes_per_s)
        more = max(
            roofs.bytes_per_s / self._roofs.bytes_per_s, roofs.flops_per_s / self._roofs.flops_per_s
        )
        if more >= _WORTH_KEEPING and self._clock() >= self._next_at:
            self._next_at = self._clock() + _KEEP_INTERVAL_S
            self._roofs = roofs
            self._keep(roofs)


def keep_achieved(achieved: Ceilings, dtype: torch.dtype, num_threads: int, device: str) -> None:
    """Beside what was measured, until that is measured anew. Waits for nobody: who has the file
    now is about to change it, and what is not kept today is achieved again."""
    path, key = cache_path(), _key(dtype, num_threads, device)
    try:
        with _locked(path.with_suffix(".lock"), 0.0):
            found = _read(path).get(key)
            if found is not None and (best := found.best.highest(achieved)) != found.best:
                _keep(path, key, replace(found, achieved=best))
    except TimeoutError:
        logger.debug("another process has %s: what was achieved is not kept", path)
    except OSError as error:
        logger.warning("higher ceilings, which this worker achieved, are not kept: %s", error)


def cache_path() -> Path:
    """Where ceilings are kept: in splitserve under XDG_CACHE_HOME or ~/.cache."""
    return user_cache_dir() / f"ceilings-v{_METHOD}.json"


@torch.inference_mode()
def measure(dtype: torch.dtype, device: str = "cpu") -> Ceilings:
    """The copy bandwidth and the matmul peak of a GPU, or of the CPU with torch's present threads.

    The best of several repeats: whatever else runs can only slow them down. Takes about 0.3 s,
    and 256 MiB that are free again afterwards; on a GPU up to 0.8 GiB.
    """
    return Ceilings(_copy_bytes_per_s(device), _matmul_flops_per_s(dtype, device))


def _copy_bytes_per_s(device: str) -> float:
    num_bytes = _COPY_BYTES if device == "cpu" else _GPU_COPY_BYTES
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _shortest_s(partial(target.copy_, source), _COPY_S, device)


def _matmul_flops_per_s(dtype: torch.dtype, device: str) -> float:
    best = 0.0
    for size in _MATMUL_SIZES if device == "cpu" else _GPU_MATMUL_SIZES:
        a, b, product = torch.ones(3, size, size, dtype=dtype, device=device)
        shortest_s = _shortest_s(partial(torch.mm, a, b, out=product), _MATMUL_S, device)
        best = max(best, 2 * size**3 / shortest_s)
        if shortest_s > _LONGEST_MATMUL_S:
            break
    return best


def _shortest_s(run: Callable[[], object], time_s: float, device: str) -> float:
    """Of as many runs as fit into `time_s`, at least two.

    One before them counts not: it gets memory, and libraries set themselves up.
    """
    run()
    run_s_of = _cpu_s if device == "cpu" else _gpu_s
    shortest_s, spent_s, num_runs = math.inf, 0.0, 0
    while spent_s < time_s or num_runs < 2:
        run_s = run_s_of(run)
        shortest_s, spent_s, num_runs = min(shortest_s, run_s), spent_s + run_s, num_runs + 1
    return shortest_s


def _cpu_s(run: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    run()
    return time.perf_counter() - started_at


def _gpu_s(run: Callable[[], object]) -> float:
    """By the clock of the present GPU."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record()
    run()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000  # of ms


def _key(dtype: torch.dtype, num_threads: int, device: str) -> str:
    name = str(dtype).removeprefix("torch.")
    if device != "cpu":
        return f"{torch.cuda.get_device_name(device)}, {name}, torch {torch.__version__}"
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
                Ceilings(**value["achieved"]) if value.get("achieved") else None,
            )
            for key, value in kept.items()
        }
        pairs = [pair for value in found.values() for pair in (value.ceilings, value.best)]
        numbers = [number for pair in pairs for number in asdict(pair).values()]
        if all(0 < n < math.inf for n in numbers):
            return found
    except (OSError, LookupError, ValueError, TypeError, AttributeError, RecursionError):
        pass  # it is measured and written anew
    return {}


def _keep(path: Path, key: str, measured: _Kept) -> None:
    """Add to the file, whole or not at all. The caller holds the lock. Raises OSError."""
    kept = {key: asdict(value) for key, value in {**_read(path), key: measured}.items()}
    unfinished = path.with_suffix(".partial")
    unfinished.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    unfinished.rename(path)


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Hold the file's lock; or warn. Yields which."""
    with ExitStack() as stack:
        held = False
        try:
            stack.enter_context(_locked(path, _LOCK_TIMEOUT_S))
            held = True
        except OSError as error:
            _warn(error)
        yield held


@contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the file's lock, which the kernel takes back from the dead. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.open("w") as file:
        _wait_for_lock(file, timeout_s)
        yield


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
