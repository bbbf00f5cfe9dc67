"""One row for each engine step, in a ring of fixed size."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from splitserve.profiling.evidence import PHASES

CAPACITY = 8192  # rows; 1.2 MiB

STEP = np.dtype(
    [
        ("ended_at", "f8"),  # on the worker's monotonic clock, s
        *((f"{phase}_s", "f8") for phase in PHASES),  # since the row before ended
        ("num_prefill_tokens", "i8"),
        ("num_decode_tokens", "i8"),
        ("num_slots_used", "i8"),  # sequences (decode), tokens (prefill)
        ("num_slots_allowed", "i8"),
        ("slot_limit", "i8"),  # index into SLOT_LIMITS: why not more
        ("num_kv_blocks_used", "i8"),
        ("num_bytes", "i8"),
        ("num_flops", "i8"),
    ]
)
COLUMNS: tuple[str, ...] = STEP.names or ()

Rows = npt.NDArray[Any]  # of STEP


class StepLog:
    """Owns the last rows of one worker, oldest overwritten first."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.num_rows = 0  # ever written
        self._rows: Rows = np.zeros(capacity, STEP)

    def append(self, row: tuple[float, ...]) -> None:
        """`row` has a value for each column of STEP, in order."""
        self._rows[self.num_rows % len(self._rows)] = row
        self.num_rows += 1

    def since(self, num_rows: int) -> Rows:
        """A copy of what was written after the first `num_rows` rows, as far as it is here."""
        first = max(num_rows, self.num_rows - len(self._rows))
        places = np.arange(first, self.num_rows) % len(self._rows)
        return self._rows[places]
