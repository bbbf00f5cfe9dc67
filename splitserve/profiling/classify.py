"""From what a worker measured to what binds it: a checklist, in the order one works through it.

The questions are ordered by what would spoil the answers after them. A roofline says nothing about
a worker that waits, nor about a batch that could be wider.
"""

from __future__ import annotations

from splitserve.profiling.evidence import (
    HOST_PHASES,
    SLOT_LIMITS,
    Bottleneck,
    Evidence,
    Phase,
    SlotLimit,
)

# A quarter of the time: taking it away makes a worker 1.33 times as fast, more than noise.
TRANSFER_GAPS = 0.25
# A worker that waits for requests is only bound by something else if it mostly works.
IDLE_GAPS = 0.5
# The forward pass is what a worker is for. With 0.3 around it, hiding that gives 1.4 times.
HOST_SHARE = 0.3
# Filling the batch is the cheapest remedy there is, but under 1.5 times the roofs are near anyway.
FULL_BATCH_GAIN = 1.5
# The roofs are of one long copy and one large matmul. A forward pass that takes at most twice its
# floor has no big kernel left to mend.
NEAR_ROOF = 0.5
# Decode gathers KV from scattered blocks, and there a core alone has reached a third to a half of
# what it copies in one stream. So where bytes clearly outweigh FLOPs, who moves a quarter is bound
# by moving; who moves less has something else in its way.
NEAR_IN_PIECES = 0.25
CLEARLY = 2.0

WHY_NOT_MORE: dict[SlotLimit, str] = {
    "cap": "the batch is full",
    "no_request": "no other request is here",
    "no_blocks": "no KV blocks are free for those who wait",
    "waiting_for_kv": "those who would join wait for their KV",
}


def classify(evidence: Evidence) -> Bottleneck:
    """What binds the worker in this window."""
    return _by_gaps(evidence) or _by_host(evidence) or _by_batch(evidence) or _by_roofs(evidence)


def explain(evidence: Evidence) -> str:
    """One line about `evidence.bottleneck`: the numbers that decided."""
    match evidence.bottleneck:
        case "idle":
            waiting = percent(waiting_share(evidence))
            text = f"{waiting} of the time there is nothing that it could compute"
        case "transfer" if kv_gap_share(evidence) >= TRANSFER_GAPS:
            text = f"{percent(kv_gap_share(evidence))} of the time is a wait for KV on its way"
        case "transfer" | "batching":
            text = _about_the_batch(evidence)
        case "host":
            text = _about_the_host(evidence)
        case "kernels":
            text = _about_the_kernels(evidence)
        case "memory" | "compute":
            text = _about_the_roofs(evidence)
    return f"{evidence.bottleneck}: {text}"


def kv_gap_share(evidence: Evidence) -> float:
    return share(evidence.kv_wait_s, evidence.window_s)


def waiting_share(evidence: Evidence) -> float:
    return share(evidence.wait_s, evidence.window_s)


def host_share(evidence: Evidence) -> float:
    """Of busy time, not of the window."""
    return share(evidence.host_s, evidence.busy_s)


def slot_limit(evidence: Evidence) -> SlotLimit:
    """Why batches had no more, for most of the forward time."""
    return max(SLOT_LIMITS, key=lambda limit: limit_s(evidence, limit))


def limit_s(evidence: Evidence, limit: SlotLimit) -> float:
    """Seconds of forward passes whose batch had no more for that reason."""
    seconds: float = getattr(evidence, f"{limit}_s")
    return seconds


def nearer_roof(evidence: Evidence) -> Bottleneck:
    return "memory" if evidence.memory_floor_s >= evidence.compute_floor_s else "compute"


def largest_host_phase(evidence: Evidence) -> tuple[Phase, float]:
    """Its name and its seconds."""
    phase = max(HOST_PHASES, key=lambda phase: phase_s(evidence, phase))
    return phase, phase_s(evidence, phase)


def phase_s(evidence: Evidence, phase: Phase) -> float:
    seconds: float = getattr(evidence, f"{phase}_s")
    return seconds


def share(part: float, whole: float) -> float:
    """Nothing has no parts."""
    return part / whole if whole else 0.0


def _by_gaps(evidence: Evidence) -> Bottleneck | None:
    if kv_gap_share(evidence) >= TRANSFER_GAPS:
        return "transfer"
    if waiting_share(evidence) >= IDLE_GAPS:
        return "idle"
    waits_s = evidence.wait_s + evidence.kv_wait_s
    if evidence.num_steps == 0 and waits_s >= evidence.host_s:
        return "transfer" if evidence.kv_wait_s > evidence.wait_s else "idle"
    return None


def _by_host(evidence: Evidence) -> Bottleneck | None:
    return "host" if host_share(evidence) >= HOST_SHARE else None


def _by_batch(evidence: Evidence) -> Bottleneck | None:
    """A batch that would gain nothing from being full counts as full."""
    limit = slot_limit(evidence)
    if limit == "cap" or evidence.full_batch_gain < FULL_BATCH_GAIN:
        return None
    return "transfer" if limit == "waiting_for_kv" else "batching"


def _by_roofs(evidence: Evidence) -> Bottleneck:
    if evidence.efficiency >= NEAR_ROOF:
        return nearer_roof(evidence)
    moves_clearly = evidence.memory_floor_s >= CLEARLY * evidence.compute_floor_s
    return "memory" if moves_clearly and evidence.efficiency >= NEAR_IN_PIECES else "kernels"


def _about_the_batch(evidence: Evidence) -> str:
    limit = slot_limit(evidence)
    return (
        f"batches fill {percent(share(evidence.num_slots_used, evidence.num_slots_allowed))} of"
        f" their slots, in {percent(share(limit_s(evidence, limit), evidence.forward_s))} of"
        f" forward time because {WHY_NOT_MORE[limit]};"
        f" full ones would do {evidence.full_batch_gain:.1f} times the work per second"
    )


def _about_the_host(evidence: Evidence) -> str:
    phase, seconds = largest_host_phase(evidence)
    return (
        f"{percent(host_share(evidence))} of busy time is Python around forward passes,"
        f" most of it {phase} ({percent(share(seconds, evidence.busy_s))})"
    )


def _about_the_kernels(evidence: Evidence) -> str:
    gain = evidence.full_batch_gain
    batch = "with full batches"
    if gain >= 1.05:
        batch = f"and full batches would do only {gain:.1f} times the work per second"
    return (
        f"forward passes reach {percent(evidence.efficiency)} of what the machine can do, {batch};"
        f" the nearer roof is {nearer_roof(evidence)}"
    )


def _about_the_roofs(evidence: Evidence) -> str:
    memory = share(evidence.memory_floor_s, evidence.forward_s)
    compute = share(evidence.compute_floor_s, evidence.forward_s)
    if evidence.bottleneck == "memory":
        return (
            f"moving the bytes takes at least {percent(memory)} of forward time,"
            f" the FLOPs {percent(compute)}"
        )
    return (
        f"the FLOPs take at least {percent(compute)} of forward time,"
        f" moving the bytes {percent(memory)}"
    )


def percent(part: float) -> str:
    """A share of 1, as people read it."""
    return f"{100 * part:.0f} %"
