"""What to do about a bottleneck: ideas for its class, ranked by the speedup they should give.

Each comes with its arithmetic, so that a reader can disagree with a number and not with a verdict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from splitserve.profiling.classify import classify, share
from splitserve.profiling.evidence import Evidence
from splitserve.profiling.ideas import FASTER_KERNELS, IDEAS
from splitserve.profiling.predictions import PoolFacts
from splitserve.profiling.remedy import Case, Remedy

__all__ = ["PoolFacts", "Remedy", "merge", "remedies"]

# Nearer to the roof than this, kernels are the most work for the least gain: the last to try.
KERNELS_FIRST_BELOW = 0.25


def merge(evidences: Sequence[Evidence]) -> Evidence:
    """All windows as one, with the class of the whole; `window` is the last one's number."""
    if not evidences:
        return Evidence()
    summed: dict[str, Any] = {
        field.name: sum(getattr(evidence, field.name) for evidence in evidences)
        for field in dataclasses.fields(Evidence)
        if field.name != "bottleneck"
    }
    forward_s = summed["forward_s"]
    gain_s = sum(e.full_batch_gain * e.forward_s for e in evidences)
    blocks = sum(e.num_kv_blocks_used * e.num_steps for e in evidences)
    summed["window"] = evidences[-1].window
    summed["full_batch_gain"] = gain_s / forward_s if forward_s else 1.0
    summed["num_kv_blocks_used"] = share(blocks, summed["num_steps"])
    merged = Evidence(**summed)
    return dataclasses.replace(merged, bottleneck=classify(merged))


def remedies(evidence: Evidence, facts: PoolFacts) -> tuple[Remedy, ...]:
    """For `evidence.bottleneck`, best first; but faster kernels last, unless far from the roof."""
    found = IDEAS[evidence.bottleneck](Case(evidence, facts))
    found.sort(key=lambda remedy: remedy.speedup, reverse=True)
    if evidence.efficiency >= KERNELS_FIRST_BELOW:
        found.sort(key=lambda remedy: remedy.title == FASTER_KERNELS)
    return tuple(found)
