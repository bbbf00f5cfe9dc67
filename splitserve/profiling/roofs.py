"""Roofs that a worker beat: whoever is above one has measured it better."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from splitserve.profiling.evidence import Evidence
from splitserve.work import Ceilings

_ROUNDING = 1 + 1e-6


def raised(evidence: Evidence, roofs: Ceilings, weight_bytes: int) -> tuple[Evidence, Ceilings]:
    """A window with efficiency above 1 is held against what it achieved, and lies under that.

    Steps that are bound by one roof and steps bound by the other then add up to all of its time.
    The roofs that come with it are for the windows to come: FLOPs as achieved, of bytes no more
    than the weights. KV is counted for each sequence, and what they share may come from a cache.
    """
    if evidence.efficiency <= 1:
        return evidence, roofs
    higher = roofs.highest(_achieved(evidence, evidence.num_bytes))
    lowered = replace(
        evidence,
        memory_floor_s=evidence.num_bytes / higher.bytes_per_s,
        compute_floor_s=evidence.num_flops / higher.flops_per_s,
        floor_s=evidence.forward_s,
    )
    of_weights = min(evidence.num_steps * weight_bytes, evidence.num_bytes)
    return lowered, roofs.highest(_achieved(evidence, of_weights))


def roofs_of(windows: Iterable[Evidence], roofs: Ceilings) -> Ceilings:
    """Those that a worker's windows were held against at last, from the ones it began with."""
    for evidence in windows:
        roofs = Ceilings(
            _used(roofs.bytes_per_s, evidence.num_bytes, evidence.memory_floor_s),
            _used(roofs.flops_per_s, evidence.num_flops, evidence.compute_floor_s),
        )
    return roofs


def _used(roof: float, amount: float, floor_s: float) -> float:
    """What makes `floor_s` of an amount, unless it is `roof` but for rounding, or below."""
    used = amount / floor_s if floor_s > 0 else 0.0
    return used if used > roof * _ROUNDING else roof


def _achieved(evidence: Evidence, num_bytes: int) -> Ceilings:
    return Ceilings(num_bytes / evidence.forward_s, evidence.num_flops / evidence.forward_s)
