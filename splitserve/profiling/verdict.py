"""What a profile says: of each worker what binds it, of the cluster which pool, and what to do."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from splitserve.config import ROLES, Role
from splitserve.profiling.classify import (
    WHY_NOT_MORE,
    classify,
    explain,
    kv_gap_share,
    nearer_roof,
    percent,
    share,
    slot_limit,
    waiting_share,
)
from splitserve.profiling.collected import Profile, WorkerProfile
from splitserve.profiling.entries import WorkerFacts
from splitserve.profiling.evidence import Bottleneck, Evidence
from splitserve.profiling.remedies import PoolFacts, Remedy, merge, remedies

# Two pools whose busy shares differ by less are as good as equally loaded.
_CLOSE = 0.15
# The last chunk of a prompt seldom fits exactly.
_AS_GOOD_AS_FULL = 0.9

MEANINGS: dict[Bottleneck, str] = {
    "compute": "the arithmetic runs at half of the machine's peak or more, and fuller batches would"
    " gain little",
    "memory": "moving weights and KV takes longer than the arithmetic, and is the first limit that"
    " steps would meet",
    "kernels": "forward passes stay far from both roofs, and fuller batches would gain little",
    "host": "Python around the forward passes takes too much of the time",
    "batching": "a step has room for more requests, which would cost less than those it has",
    "transfer": "the worker waits for KV that is on its way",
    "idle": "most of the time there is nothing to compute",
}

Binding = Literal["prefill", "decode", "transfer", "load", "nothing"]


@dataclass(frozen=True, slots=True)
class WorkerVerdict:
    """What binds one worker, how often it did, and the evidence of those windows, merged."""

    facts: WorkerFacts
    bottleneck: Bottleneck
    num_said_so: int  # windows
    num_windows: int
    evidence: Evidence
    overall: Evidence  # of all windows
    remedies: tuple[Remedy, ...]  # best first

    @property
    def reason(self) -> str:
        """One line: the numbers that decided."""
        if not self.num_windows:
            return "it reported no window"
        return explain(self.evidence).removeprefix(f"{self.bottleneck}: ")

    @property
    def is_bound(self) -> bool:
        """Whether this worker could not have done more, had there been more to do."""
        if self.bottleneck == "batching":
            return slot_limit(self.evidence) == "no_blocks"
        return self.bottleneck != "idle"


@dataclass(frozen=True, slots=True)
class ClusterVerdict:
    """Which pool binds the cluster, in words, and the remedy to begin with."""

    binding: Binding
    headline: str
    why: str
    first: Remedy | None

    @property
    def advice(self) -> str:
        return f"First: {remedy_text(self.first)}." if self.first else ""


def utilisation(evidence: Evidence) -> float:
    """Presence: the share of time in forward passes, whatever they achieve."""
    return share(evidence.forward_s, evidence.window_s)


def saturation(evidence: Evidence) -> float:
    """Achieved over peak of the nearer roof, while forward passes run."""
    nearer_s = max(evidence.memory_floor_s, evidence.compute_floor_s)
    return share(nearer_s, evidence.forward_s)


def occupancy(evidence: Evidence) -> float:
    return share(evidence.num_slots_used, evidence.num_slots_allowed)


def shares_text(evidence: Evidence) -> str:
    """Where the time went that was not spent in forward passes, how full batches were, and why."""
    text = (
        f"{percent(waiting_share(evidence))} waiting for requests,"
        f" {percent(kv_gap_share(evidence))} for KV,"
        f" {percent(share(evidence.host_s, evidence.window_s))} host work"
    )
    if evidence.num_slots_allowed:
        text += f"; batches {percent(occupancy(evidence))} full"
        limit = slot_limit(evidence)
        is_full = limit == "cap" or occupancy(evidence) >= _AS_GOOD_AS_FULL
        text += "" if is_full else f": {WHY_NOT_MORE[limit]}"
    return text


def presence_text(evidence: Evidence) -> str:
    """Utilisation and saturation, next to each other."""
    return (
        f"utilisation {percent(utilisation(evidence))},"
        f" saturation {percent(saturation(evidence))} of the {nearer_roof(evidence)} roof"
    )


def remedy_text(remedy: Remedy) -> str:
    """Its title, and the speedup where it promises one: of a worker, or of the pool it makes."""
    gain = f" (predicted: {remedy.speedup:.1f} times its tokens/s)" if remedy.speedup > 1.05 else ""
    return f"{remedy.title}{gain}"


def worker_verdicts(profile: Profile) -> tuple[WorkerVerdict, ...]:
    """One for each worker, prefill first."""
    order = {str(role): place for place, role in enumerate(ROLES)}
    workers = sorted(profile.workers, key=lambda w: order.get(w.facts.role, len(order)))
    cluster = [worker.facts for worker in workers]
    return tuple(_worker_verdict(worker, cluster) for worker in workers)


def cluster_verdict(workers: Sequence[WorkerVerdict]) -> ClusterVerdict:
    """The pool that binds is the one, of those at a limit, that has the least time left.

    Of pools that are as good as equally loaded it is the one with more to win.
    """
    pools = {role: [w for w in workers if w.facts.role == role] for role in ROLES}
    bound = [role for role in ROLES if any(w.is_bound for w in pools[role])]
    if bound:
        return _of_pool(_most_bound({role: pools[role] for role in bound}), pools)
    if roomy := [w for w in workers if w.bottleneck == "batching"]:
        one = roomy[-1]
        return ClusterVerdict(
            "load",
            "Neither pool is at its limit: batches have room",
            f"{one.facts.worker_id} fills {percent(occupancy(one.evidence))} of its batch, because"
            f" {WHY_NOT_MORE[slot_limit(one.evidence)]}. The load binds, not a worker.",
            _first(one),
        )
    return ClusterVerdict(
        "nothing",
        "Nothing binds: the cluster had little to do",
        "Workers waited for requests most of the time. Profile it under load.",
        None,
    )


def _most_bound(bound: dict[Role, list[WorkerVerdict]]) -> Role:
    most = max(map(_loaded_share, bound.values()))
    close = [role for role, pool in bound.items() if _loaded_share(pool) >= most - _CLOSE]
    return max(close, key=lambda role: (_most_to_win(bound[role]), _loaded_share(bound[role])))


def _most_to_win(pool: Sequence[WorkerVerdict]) -> float:
    firsts = [_first(worker) for worker in pool if worker.is_bound]
    return max((first.speedup for first in firsts if first is not None), default=1.0)


def _worker_verdict(worker: WorkerProfile, cluster: Sequence[WorkerFacts]) -> WorkerVerdict:
    evidences = [window.evidence for window in worker.windows]
    overall = merge(evidences) if evidences else Evidence()
    tally = Counter(evidence.bottleneck for evidence in evidences)
    tally[classify(overall)] += 0  # breaks no tie by itself, and is there when nothing is
    bottleneck = max(tally, key=lambda name: (tally[name], name == classify(overall)))
    said_so = [evidence for evidence in evidences if evidence.bottleneck == bottleneck]
    evidence = merge(said_so) if said_so else overall
    evidence = dataclasses.replace(evidence, bottleneck=bottleneck)
    facts = _pool_facts(worker.facts, cluster)
    return WorkerVerdict(
        facts=worker.facts,
        bottleneck=bottleneck,
        num_said_so=len(said_so),
        num_windows=len(evidences),
        evidence=evidence,
        overall=overall,
        remedies=tuple(remedies(evidence, facts)) if facts and evidences else (),
    )


def _pool_facts(facts: WorkerFacts, cluster: Sequence[WorkerFacts]) -> PoolFacts | None:
    """None for a worker of which too little is known to predict anything."""
    role: Role | None = next((role for role in ROLES if role == facts.role), None)
    if role is None or not (facts.bytes_per_s and facts.flops_per_s):
        return None
    counts = Counter(one.role for one in cluster)
    return PoolFacts(
        role=role,
        num_prefill=counts["prefill"],
        num_decode=counts["decode"],
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        weight_bytes=facts.weight_bytes,
        weight_bytes_per_number=facts.weight_bytes_per_number,
        kv_token_bytes=facts.kv_token_bytes,
        kv_int8_token_bytes=facts.kv_int8_token_bytes,
        bytes_per_s=facts.bytes_per_s,
        flops_per_s=facts.flops_per_s,
        transport=facts.transport,
        num_threads=facts.num_threads,
        device=facts.device,
        num_spare_cores=_num_spare_cores([one for one in cluster if one.host == facts.host]),
    )


def _num_spare_cores(neighbours: Sequence[WorkerFacts]) -> int | None:
    """Of one host: those that no thread of its workers is meant for. None is not known."""
    num_cores = max(one.num_cores for one in neighbours)
    num_threads = sum(one.num_threads for one in neighbours)
    return max(0, num_cores - num_threads) if num_cores else None


def _of_pool(role: Role, pools: dict[Role, list[WorkerVerdict]]) -> ClusterVerdict:
    pool = pools[role]
    bound = [worker for worker in pool if worker.is_bound]
    name = _most_common(bound)
    worker = next(worker for worker in bound if worker.bottleneck == name)
    where = (
        "on its only worker" if len(pool) == 1 else f"on {len(bound)} of its {len(pool)} workers"
    )
    why = (
        f"{MEANINGS[name]}, {where}. The {role} pool has work {percent(_loaded_share(pool))}"
        f" of the time. {_of_other_pool(role, pools)}"
    )
    return ClusterVerdict(
        "transfer" if name == "transfer" else role,
        "The way between the pools binds"
        if name == "transfer"
        else f"The {role} pool binds: {name}",
        f"{why[0].upper()}{why[1:]}".strip(),
        _first(worker),
    )


def _of_other_pool(role: Role, pools: dict[Role, list[WorkerVerdict]]) -> str:
    other: Role = "decode" if role == "prefill" else "prefill"
    pool = pools[other]
    if not pool:
        return ""
    loaded = _loaded_share(pool)
    bound = [worker for worker in pool if worker.is_bound]
    if bound and loaded > _loaded_share(pools[role]) - _CLOSE:
        first = _first(next(w for w in bound if w.bottleneck == _most_common(bound)))
        after = f"; after that, there: {remedy_text(first)}" if first is not None else ""
        then = f"it is as close to its limit ({_most_common(bound)}){after}"
    elif _most_common(pool) == "batching":
        then = "its batches have room for more"
    else:
        then = "it has time to spare"
    return f"The {other} pool has work {percent(loaded)} of the time, and {then}."


def _most_common(workers: Sequence[WorkerVerdict]) -> Bottleneck:
    return Counter(worker.bottleneck for worker in workers).most_common(1)[0][0]


def _loaded_share(pool: Sequence[WorkerVerdict]) -> float:
    """Of the time, what was not a wait for requests. A wait for KV is one with work at hand."""
    window_s = sum(worker.overall.window_s for worker in pool)
    return 1 - share(sum(worker.overall.wait_s for worker in pool), window_s) if window_s else 0.0


def _first(worker: WorkerVerdict) -> Remedy | None:
    return next(iter(worker.remedies), None)
