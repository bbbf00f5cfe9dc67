"""The operations of a few steps, one by one, as torch's profiler sees them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# What torch.profiler.profile is made of. That one imports torch._inductor at its first start, which
# keeps a worker's loop waiting for one second or two; this one starts within a millisecond.
from torch.autograd.profiler import profile

from splitserve.work import Operation

# Of all steps that are watched. In torch's operations SmolLM2-135M has 3,800 a step; the compiled
# pass tells its own stages, 8 a layer and 2.
MAX_OPERATIONS = 20_000

log = logging.getLogger(__name__)


class KernelTrace:
    """Owns torch's profiler in a worker: which of the next steps it watches, and what it saw.

    A watched step is slower, most of all one of many small operations, so that its times are no
    measurement of the worker: they show what there is, in which order, and what takes longest.
    """

    def __init__(self, *, on_gpu: bool = False) -> None:
        self._device = "cuda" if on_gpu else None  # beside the CPU
        self._num_steps = 0  # still to be watched
        self._operations: list[Operation] = []
        self._room = 0
        self._num_left_out = 0

    def watch(self, num_steps: int) -> None:
        """The next steps are watched; with 0 none is any more."""
        self._num_steps, self._room = num_steps, MAX_OPERATIONS

    @contextmanager
    def step(self) -> Iterator[bool]:
        """The block is a step, and is told whether it is watched.

        It goes on whatever happens to the profiler: that is a warning, and the end of watching.
        """
        profiler = self._started() if self._num_steps else None
        try:
            yield profiler is not None
        finally:
            if profiler is not None:
                self._stop(profiler)

    def take(self) -> tuple[list[Operation], int]:
        """What was seen since the last call, and how many operations more there was no room for."""
        taken = self._operations, self._num_left_out
        self._operations, self._num_left_out = [], 0
        return taken

    def _started(self) -> profile | None:
        self._num_steps -= 1
        try:
            profiler = profile(use_kineto=True, use_device=self._device)
            profiler.__enter__()  # type: ignore[no-untyped-call]
        except Exception as error:
            self._give_up(error)
            return None
        return profiler

    def _stop(self, profiler: profile) -> None:
        try:
            profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._keep(profiler)
        except Exception as error:
            self._give_up(error)

    def _keep(self, profiler: profile) -> None:
        """From raw events: the profiler's own tables of them take ten times as long to make."""
        assert profiler.kineto_results is not None
        events = profiler.kineto_results.events()
        ahead_ns = time.time_ns() - time.monotonic_ns()  # they are stamped with the wall clock
        kept = events[: self._room]
        self.add(
            Operation(e.name(), (e.start_ns() - ahead_ns) / 1e9, e.duration_ns() / 1e9)
            for e in kept
        )
        self._num_left_out += len(events) - len(kept)

    def add(self, operations: Iterable[Operation]) -> None:
        """What the profiler can't see of the watched step; as much of it as there is room for."""
        seen = list(operations)
        kept = seen[: self._room]
        self._operations += kept
        self._room -= len(kept)
        self._num_left_out += len(seen) - len(kept)

    def _give_up(self, error: Exception) -> None:
        self._num_steps = 0
        log.warning("torch's profiler failed, so no operations are told: %s", error)
