"""What one tries against each bottleneck. The order here means nothing; `remedies` ranks them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from splitserve.profiling.classify import (
    largest_host_phase,
    nearer_roof,
    share,
    slot_limit,
    waiting_share,
)
from splitserve.profiling.evidence import Bottleneck
from splitserve.profiling.predictions import (
    batch_size,
    room,
    speedup,
    speedup_of_batches,
    speedup_of_forward,
    step_floor,
)
from splitserve.profiling.remedy import Case, Remedy

FASTER_KERNELS = "faster kernels: the operations that are furthest from their roof"

# The best part of the roof to expect of a forward pass on real shapes. Large matmuls get near
# theirs, the small operations between them do not. Gathering KV from blocks reached a third to a
# half of what one stream copies.
REACHABLE_ROOF: dict[Bottleneck, float] = {"compute": 0.6, "memory": 0.4}
# benchmarks/engine_step.py, one thread to two: 1.3 (decode, batch 1) to 1.9 (prefill) times.
TWICE_THE_THREADS = 1.5
# Shared memory or RDMA against a TCP socket, which copies bytes more than once: not measured here.
OTHER_TRANSPORT = 4.0
# Layers leave while later ones compute: half the wait, for a transfer as long as its prefill.
LAYER_WISE = 2.0
# Where a worker can have int8. Products are of numbers that are widened again, and cost as much.
WHERE_INT8 = "in bfloat16 on a CPU with AVX-512 BF16"
# How much of the KV belongs to prompts that begin alike is not recorded. Half is a guess, and the
# text says so.
SHARED_PREFIX = 0.5
# The host work of a step is not quite constant: beyond twice the batch the model is too kind.
HOST_BATCHES = 2.0


def _memory(case: Case) -> list[Remedy]:
    floor = step_floor(case.evidence, case.facts)
    found = [_wider_batches(case, math.inf), _prefix_reuse(case)]
    width, kv_ratio = case.facts.weight_bytes_per_number, case.facts.int8_kv_ratio
    if kv_ratio < 1:
        lower = replace(floor, kv_bytes=floor.kv_bytes * kv_ratio)
        why = f"{_fewer_bytes(case)}, {WHERE_INT8}"
        found.append(case.lower_floor(f"quantised KV: {_int8_kv(case)}", lower, why))
    if width > 1:
        lower = replace(floor, weight_bytes=floor.weight_bytes / width)
        why = f"1 byte a number in place of {width}, {WHERE_INT8}"
        title = f"quantised weights: {_int8(case, '--quantization')}"
        found.append(case.lower_floor(title, lower, why))
    return found + _last_of_the_roof(case)


def _batching(case: Case) -> list[Remedy]:
    if slot_limit(case.evidence) == "no_blocks":
        return _more_blocks(case)
    role, num, full = case.facts.role, case.facts.num_workers, room(case.evidence)
    slots = "sequences" if role == "decode" else "prompt tokens"
    size = batch_size(case.evidence)
    found = [
        case.batches(
            f"more requests at once for each {role} worker",
            full,
            f"up to {size * full:.0f} {slots} a step in place of {size:.1f}",
        )
    ]
    if num > 1:
        times = min(num / (num - 1), full)
        pool = speedup_of_batches(case.evidence, case.facts, times) * (num - 1) / num
        found.append(
            case.batches(
                f"fewer {role} workers: {num} to {num - 1}",
                times,
                f"the same requests on {num - 1} in place of {num}, which do"
                f" {pool:.2f} times what the pool does now",
            )
        )
    return found


def _more_blocks(case: Case) -> list[Remedy]:
    full, used = room(case.evidence), case.evidence.num_kv_blocks_used
    found = [
        case.batches(
            "more KV memory: kv_cache_memory_bytes or num_blocks",
            full,
            f"{used * full:.0f} blocks in place of {used:.0f} fill the batch",
        ),
        case.batches(
            "admission: no more max_tokens than needed",
            min(2.0, full),
            "if half the blocks do for a request",
        ),
    ]
    if (ratio := case.facts.int8_kv_ratio) < 1:
        why = f"{_fewer_bytes(case)}, {WHERE_INT8}"
        found.append(case.batches(f"quantised KV: {_int8_kv(case)}", min(1 / ratio, full), why))
    return found


def _host(case: Case) -> list[Remedy]:
    evidence = case.evidence
    phase, phase_s = largest_host_phase(evidence)
    return [
        case.less_time(
            "overlap: host work of the next step during the forward pass",
            min(evidence.host_s, evidence.forward_s),
            f"host work, {case.of_window(evidence.host_s)}, hides behind forward,"
            f" {case.of_window(evidence.forward_s)}",
        ),
        case.less_time(
            f"fewer Python steps: {phase} in half its time",
            phase_s / 2,
            f"half of {phase}, {case.of_window(phase_s)}",
        ),
        _wider_batches(case, HOST_BATCHES),
    ]


def _transfer(case: Case) -> list[Remedy]:
    facts = case.facts
    if facts.transport in ("auto", "tcp"):
        other = "another transport: shared memory on one host, RDMA between two"
    else:
        other = f"another transport or a faster link: {facts.transport} is in use"
    found = [
        case.sooner("layer-wise push: KV leaves while later layers compute", LAYER_WISE),
        case.sooner(other, OTHER_TRANSPORT),
    ]
    if (ratio := facts.int8_kv_ratio) < 1:
        found.append(case.sooner(f"smaller KV: {_int8_kv(case)}, {_fewer_bytes(case)}", 1 / ratio))
    return found


def _compute(case: Case) -> list[Remedy]:
    evidence, role, num = case.evidence, case.facts.role, max(1, case.facts.num_workers)
    busy_s = evidence.window_s - evidence.wait_s - evidence.kv_wait_s
    more = speedup(evidence, busy_s / (num + 1))
    found = [
        replace(
            case.made(f"more {role} workers: {num} to {num + 1}", more, ""),
            arithmetic=f"work is {case.of_window(busy_s)}, and {num + 1} share what {num} do, each"
            f" with cores of its own{_where(case)}: {max(1.0, more):.2f} times the {role} pool's"
            " tokens/s",
        )
    ]
    if case.facts.weight_bytes_per_number:
        found.append(_lower_precision(case))
    if role == "decode" and evidence.num_prefill_tokens:
        prompts = share(
            evidence.num_prefill_tokens, evidence.num_prefill_tokens + evidence.num_decode_tokens
        )
        why = f"{100 * prompts:.0f} % of the tokens computed here are prompts"
        title = "prompts to prefill workers"
        found.append(case.less_time(title, evidence.forward_s * prompts, why))
    return found + _last_of_the_roof(case)


def _lower_precision(case: Case) -> Remedy:
    """Of the products: weights that are int8 already stay as they are."""
    width, floor = case.facts.weight_bytes_per_number, step_floor(case.evidence, case.facts)
    why = "twice the matmul peak"
    if width > 1:
        floor = replace(floor, weight_bytes=floor.weight_bytes / 2)
        why += ", half the bytes of weights"
    if width > 2:
        return case.lower_floor("lower precision: --dtype bfloat16", floor, why, 2.0)
    why += ", once int8 is multiplied as it is (today it is widened before)"
    return case.lower_floor("lower precision: products of 8 bits", floor, why, 2.0)


def _int8(case: Case, flag: str) -> str:
    return f"{flag} int8" if case.facts.device == "cpu" else "int8, which GPUs do not have yet"


def _int8_kv(case: Case) -> str:
    return _int8(case, "--kv-cache-dtype")


def _fewer_bytes(case: Case) -> str:
    small, now = case.facts.kv_int8_token_bytes, case.facts.kv_token_bytes
    return f"{small} bytes a token in place of {now}"


def _where(case: Case) -> str:
    """What to know of a host that has no cores for one more worker like this."""
    spare, num = case.facts.num_spare_cores, case.facts.num_threads
    if case.facts.device != "cpu" or spare is None or spare >= num:
        return ""
    return f" (this host has {spare} to spare where one takes {num}: another machine is needed)"


def _kernels(case: Case) -> list[Remedy]:
    return [_faster_kernels(case), *_more_threads(case)]


def _more_threads(case: Case) -> list[Remedy]:
    """Up to twice as many, and no more than the host has cores for."""
    num, spare = case.facts.num_threads, case.facts.num_spare_cores
    more = num if spare is None else min(num, spare)
    if case.facts.device != "cpu" or more < 1:
        return []
    faster = TWICE_THE_THREADS ** math.log2((num + more) / num)
    forward_s = case.evidence.forward_s
    unused = f"cores of its host that no worker uses: {spare}"
    cores = "if there are cores" if spare is None else unused
    return [
        case.less_time(
            f"more threads: {num} to {num + more}",
            forward_s * (1 - 1 / faster),
            f"{cores}; forward, {case.of_window(forward_s)}, {faster:.2g} times as fast",
        )
    ]


def _idle(case: Case) -> list[Remedy]:
    """Nothing speeds up a worker that waits; the text says what could be taken away."""
    role, num, waits = case.facts.role, case.facts.num_workers, waiting_share(case.evidence)
    worth = num * max(0.0, 1 - waits)
    text = f"{100 * waits:.0f} % of the time it waits: {num} like it do the work of {worth:.2f}"
    titles = [f"more load: the {role} pool is not what binds"]
    if num > 1:
        titles.insert(0, f"fewer {role} workers: {num} to {max(1, math.ceil(worth))}")
    return [Remedy(title, 1.0, text, role) for title in titles]


def _prefix_reuse(case: Case) -> Remedy:
    floor = step_floor(case.evidence, case.facts)
    guess = f"if {100 * SHARED_PREFIX:.0f} % of"
    if case.facts.role == "prefill":
        rest = 1 - SHARED_PREFIX
        floor = replace(floor, kv_bytes=floor.kv_bytes * rest, flops=floor.flops * rest)
        title = "prefix reuse: compute what prompts share once"
        return case.lower_floor(title, floor, f"{guess} the prompts' tokens are there already")
    size = max(1.0, batch_size(case.evidence))
    floor = replace(floor, kv_bytes=floor.kv_bytes * (1 - SHARED_PREFIX * (size - 1) / size))
    title = "prefix reuse: read the KV of a shared prefix once"
    return case.lower_floor(title, floor, f"{guess} the KV is a prefix that all {size:.0f} share")


def _wider_batches(case: Case, most: float) -> Remedy:
    """At most `most` times as wide. A batch at its cap needs a higher one."""
    if slot_limit(case.evidence) != "cap":
        times = min(most, room(case.evidence))
        title = f"wider batches: more requests for each {case.facts.role} worker"
        return case.batches(title, times, "more rows for the same weights and host work")
    if case.facts.role == "decode":
        name, cap = "max_num_seqs", case.facts.max_num_seqs
    else:
        name, cap = "max_num_batched_tokens", case.facts.max_num_batched_tokens
    title = f"wider batches: {name} {cap} to {2 * cap}"
    return case.batches(title, 2.0, "if enough wait, twice the rows")


def _last_of_the_roof(case: Case) -> list[Remedy]:
    reachable = REACHABLE_ROOF[nearer_roof(case.evidence)]
    return [_faster_kernels(case)] if case.evidence.efficiency < reachable else []


def _faster_kernels(case: Case) -> Remedy:
    efficiency, roof = case.evidence.efficiency, nearer_roof(case.evidence)
    reachable = REACHABLE_ROOF[roof]
    ratio = min(1.0, efficiency / reachable) if efficiency else 1.0
    text = (
        f"forward takes {share(1.0, efficiency):.1f} times its floor ({roof});"
        f" {reachable} of the roof is the best to expect, so forward,"
        f" {case.of_window(case.evidence.forward_s)}, shrinks to {ratio:.2f} of itself"
    )
    return case.made(FASTER_KERNELS, speedup_of_forward(case.evidence, ratio), text)


IDEAS: dict[Bottleneck, Callable[[Case], list[Remedy]]] = {
    "memory": _memory,
    "batching": _batching,
    "host": _host,
    "transfer": _transfer,
    "compute": _compute,
    "kernels": _kernels,
    "idle": _idle,
}
