"""A recorder of a machine that nobody measured."""

from __future__ import annotations

import time
from collections.abc import Callable

from splitserve.profiling.recorder import Recorder
from splitserve.work import Ceilings

CEILINGS = Ceilings(bytes_per_s=25e9, flops_per_s=200e9)


def fake_recorder(clock: Callable[[], float] = time.monotonic) -> Recorder:
    """For workers whose model is a fake one of 1 MB."""
    return Recorder(CEILINGS, 1_000_000, clock)
