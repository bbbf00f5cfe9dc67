"""Windows of one worker: plain ones to change a number in, and any that hypothesis can think of."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st

from splitserve.profiling.classify import classify
from splitserve.profiling.evidence import Evidence

# A second of 20 steps with full batches of 8: 0.9 s of forward passes, 0.6 of their memory roof.
BUSY = Evidence(
    window=3,
    window_s=1.0,
    num_steps=20,
    receive_s=0.01,
    schedule_s=0.04,
    prepare_s=0.01,
    forward_s=0.9,
    sample_s=0.01,
    send_s=0.02,
    other_s=0.01,
    num_decode_tokens=160,
    num_slots_used=160,
    num_slots_allowed=160,
    cap_s=0.9,
    num_kv_blocks_used=150.0,
    num_bytes=5_400_000_000,
    num_flops=40_000_000_000,
    memory_floor_s=0.54,
    compute_floor_s=0.2,
    floor_s=0.54,
)


def busy(**changes: Any) -> Evidence:
    """BUSY with some numbers changed, and the class that follows."""
    evidence = dataclasses.replace(BUSY, **changes)
    return dataclasses.replace(evidence, bottleneck=classify(evidence))


def evidences() -> st.SearchStrategy[Evidence]:
    """Any numbers that can be told apart from broken ones; they need not fit together."""
    seconds = st.just(0.0) | st.floats(1e-6, 100)
    counts = st.integers(0, 10**6)
    kinds: dict[str, st.SearchStrategy[Any]] = {
        field.name: seconds if field.type == "float" else counts
        for field in dataclasses.fields(Evidence)
        if field.name != "bottleneck"
    }
    kinds |= {"full_batch_gain": st.floats(1, 1000), "num_bytes": st.integers(0, 10**15)}
    kinds |= {"num_flops": st.integers(0, 10**18)}
    return st.builds(Evidence, **kinds).map(
        lambda evidence: dataclasses.replace(evidence, bottleneck=classify(evidence))
    )
