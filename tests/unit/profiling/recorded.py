"""Streams of `POST /cluster/profile` as a cluster would send them, made from a seed."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from splitserve.profiling.classify import classify
from splitserve.profiling.evidence import PHASES, SLOT_LIMITS, Evidence
from splitserve.profiling.step_log import COLUMNS

WEIGHT_BYTES = 269_000_000
KV_TOKEN_BYTES = 23_040
KV_INT8_TOKEN_BYTES = 12_240
FLOPS_PER_TOKEN = 269_000_000
BYTES_PER_S = 27e9
FLOPS_PER_S = 217e9
NUM_CORES = 4
NUM_BLOCKS = 12288
MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 512
_WINDOW_S = 1.0
_ROWS_A_LINE = 50

Line = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """What the cluster of a recording is put to. Shares are of the time between steps."""

    num_prefill: int = 1
    num_decode: int = 1
    duration_s: float = 10.0
    num_decoding: int = 6  # sequences at a time on each decode worker
    kv_tokens: int = 320  # of each
    prefill_wait_s: float = 0.0  # of a prefill worker, before each step
    requests_per_s: float = 2.0
    num_kernel_steps: int = 0
    leaves_at: float | None = None  # the last worker's death
    joins_at: float | None = None  # one more decode worker
    seed: int = 0


PREFILL_BOUND = Load()
DECODE_BOUND = Load(
    num_prefill=2,
    num_decode=2,
    num_decoding=48,
    kv_tokens=3000,
    prefill_wait_s=0.9,
    requests_per_s=4,
)


def stream(load: Load, prefix: str = "") -> bytes:
    """The whole recording. `prefix` comes before every worker_id and the model's name."""
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines(load, prefix))


def lines(load: Load, prefix: str = "") -> Iterator[Line]:
    """What a cluster sends: the start, then everything by time, then the end."""
    rng = random.Random(load.seed)
    roles = ["prefill"] * load.num_prefill + ["decode"] * load.num_decode
    ids = [f"{prefix}{role}-{place}-{rng.getrandbits(32):08x}" for place, role in enumerate(roles)]
    named = [*zip(ids, roles, strict=True)]
    yield _start(load, prefix, named)
    told: list[tuple[float, Line]] = []
    for worker_id, role in named:
        last = worker_id == ids[-1]
        until = load.leaves_at if last and load.leaves_at else load.duration_s
        told += _Worker(worker_id, role, load, rng).life(0.0, until)
    if load.joins_at is not None:
        late = _Worker(f"{prefix}decode-9-{rng.getrandbits(32):08x}", "decode", load, rng)
        told.append((load.joins_at, {"type": "worker", **facts(late.worker_id, "decode")}))
        told += late.life(load.joins_at, load.duration_s)
    told += _requests(load, ids, roles, rng)
    for _, line in sorted(told, key=lambda pair: pair[0]):
        yield line
    yield {"type": "end", "at": load.duration_s}


def _start(load: Load, prefix: str, named: list[tuple[str, str]]) -> Line:
    return {
        "type": "start",
        "duration_s": load.duration_s,
        "model": f"{prefix}smollm2-135m",
        "target": {"prefill": load.num_prefill, "decode": load.num_decode},
        "columns": list(COLUMNS),
        "workers": [facts(worker_id, role) for worker_id, role in named],
    }


def facts(worker_id: str, role: str) -> Line:
    return {
        "worker_id": worker_id,
        "role": role,
        "host": "node-a",
        "device": "cpu",
        "num_cores": NUM_CORES,
        "num_threads": 1,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "num_blocks_total": NUM_BLOCKS,
        "bytes_per_s": BYTES_PER_S,
        "flops_per_s": FLOPS_PER_S,
        "weight_bytes": WEIGHT_BYTES,
        "weight_bytes_per_number": 2,
        "kv_token_bytes": KV_TOKEN_BYTES,
        "kv_int8_token_bytes": KV_INT8_TOKEN_BYTES,
        "transport": "tcp",
    }


class _Worker:
    """Owns one worker's made-up loop: its clock, its rows, its open window."""

    def __init__(self, worker_id: str, role: str, load: Load, rng: random.Random) -> None:
        self.worker_id, self._role, self._load, self._rng = worker_id, role, load, rng
        self._told: list[tuple[float, Line]] = []
        self._window: dict[str, float] = {}
        self._num_windows = 0

    def life(self, since: float, until: float) -> list[tuple[float, Line]]:
        now, rows, began = since, [], since
        while now < until:
            row = self._step(now)
            now = row["ended_at"]
            rows.append([row[column] for column in COLUMNS])
            self._count(row)
            if now - began >= _WINDOW_S:
                self._close(now, now - began)
                began = now
            if len(rows) == _ROWS_A_LINE or now >= until:
                self._tell(now, "steps", rows=rows)
                rows = []
        for start in range(self._load.num_kernel_steps):
            self._tell(until, "kernels", events=self._kernels(since + 0.1 * start))
        return self._told

    def _tell(self, told_at: float, kind: str, **said: Any) -> None:
        self._told.append((told_at, {"type": kind, "worker_id": self.worker_id, **said}))

    def _step(self, now: float) -> dict[str, Any]:
        prefills = self._role == "prefill"
        wobble = self._rng.uniform(0.95, 1.05)
        row: dict[str, Any] = dict.fromkeys(COLUMNS, 0)
        if prefills:
            tokens = MAX_NUM_BATCHED_TOKENS
            row |= {"num_prefill_tokens": tokens, "num_slots_allowed": tokens}
            row |= {"num_slots_used": tokens, "slot_limit": SLOT_LIMITS.index("cap")}
            row |= {"num_bytes": WEIGHT_BYTES + tokens * KV_TOKEN_BYTES, "num_kv_blocks_used": 96}
            row["num_flops"] = tokens * FLOPS_PER_TOKEN
            row["wait_s"] = self._load.prefill_wait_s * wobble
        else:
            used = max(1, round(self._load.num_decoding * self._rng.uniform(0.7, 1.3)))
            full = used >= MAX_NUM_SEQS
            row |= {"num_decode_tokens": used, "num_slots_allowed": MAX_NUM_SEQS}
            row["num_slots_used"] = min(used, MAX_NUM_SEQS)
            row["slot_limit"] = SLOT_LIMITS.index("cap" if full else "no_request")
            row["num_bytes"] = WEIGHT_BYTES + used * self._load.kv_tokens * KV_TOKEN_BYTES
            row["num_flops"] = used * FLOPS_PER_TOKEN
            row["num_kv_blocks_used"] = used * self._load.kv_tokens // 16
            row["kv_wait_s"] = 0.001 * wobble
        floor_s = max(row["num_bytes"] / BYTES_PER_S, row["num_flops"] / FLOPS_PER_S)
        row["forward_s"] = floor_s * wobble / 0.85
        for phase in ("receive_s", "schedule_s", "prepare_s", "sample_s", "send_s", "other_s"):
            row[phase] = 0.0002 * wobble
        row["ended_at"] = now + sum(row[f"{phase}_s"] for phase in PHASES)
        return row

    def _count(self, row: dict[str, Any]) -> None:
        memory_s, compute_s = row["num_bytes"] / BYTES_PER_S, row["num_flops"] / FLOPS_PER_S
        counted = {
            **{name: value for name, value in row.items() if name not in _NO_SUMS},
            "num_steps": 1,
            f"{SLOT_LIMITS[row['slot_limit']]}_s": row["forward_s"],
            "memory_floor_s": memory_s,
            "compute_floor_s": compute_s,
            "floor_s": max(memory_s, compute_s),
        }
        for name, value in counted.items():
            self._window[name] = self._window.get(name, 0) + value

    def _close(self, now: float, window_s: float) -> None:
        sums, self._window = dict(self._window), {}
        self._num_windows += 1
        blocks = sums.pop("num_kv_blocks_used") / sums["num_steps"]
        gain = 1.0 if self._role == "prefill" else max(1.0, 24 / max(1, self._load.num_decoding))
        said: dict[str, Any] = dict(sums)
        evidence = Evidence(
            window=self._num_windows,
            window_s=window_s,
            full_batch_gain=gain,
            num_kv_blocks_used=blocks,
            **said,
        )
        evidence = dataclasses.replace(evidence, bottleneck=classify(evidence))
        self._tell(now, "window", at=now, evidence=dataclasses.asdict(evidence))

    def _kernels(self, start_s: float) -> list[list[Any]]:
        return [
            [name, start_s + 0.002 * place, 0.0015]
            for place, name in enumerate(("aten::mm", "attention", "aten::add"))
        ]


_NO_SUMS = frozenset({"ended_at", "slot_limit"})


def _stages(rng: random.Random) -> dict[str, Any]:
    """Stages that follow each other; those of the hand-off fill the gap after the first token."""
    queue_s, prefill_s = rng.expovariate(1 / 0.4), rng.uniform(0.5, 0.8)
    transfer_s, decode_wait_s = rng.uniform(0.005, 0.03), rng.uniform(0.0, 0.02)
    handoff_gap_s = 0.002 + transfer_s + decode_wait_s + 0.02
    ttft_s = queue_s + prefill_s + 0.004
    return {
        "queue_s": queue_s,
        "prefill_s": prefill_s,
        "delivery_s": 0.004,
        "ttft_s": ttft_s,
        "grant_wait_s": 0.002,
        "transfer_s": transfer_s,
        "decode_wait_s": decode_wait_s,
        "first_step_s": 0.02,
        "handoff_gap_s": handoff_gap_s,
        "e2e_s": ttft_s + handoff_gap_s + rng.uniform(0.5, 1.5),
        "moments": {
            "first_kv_byte": queue_s + 0.9 * prefill_s,
            "last_kv_byte": ttft_s + transfer_s,
            "second_token_delivered": None,
        },
    }


def _requests(
    load: Load, ids: list[str], roles: list[str], rng: random.Random
) -> list[tuple[float, Line]]:
    told = []
    at = 0.0
    while (at := at + rng.expovariate(load.requests_per_s)) < load.duration_s - 1.0:
        prefill_id = rng.choice([i for i, role in zip(ids, roles, strict=True) if role[0] == "p"])
        decode_id = rng.choice([i for i, role in zip(ids, roles, strict=True) if role[0] == "d"])
        stages = _stages(rng)
        timing = {
            **stages,
            "num_kv_bytes": 256 * KV_TOKEN_BYTES,
            "prefill_worker_id": prefill_id,
            "decode_worker_id": decode_id,
        }
        line = {"type": "request", "at": at, "timing": timing}
        told.append((min(at + stages["e2e_s"], load.duration_s), line))
    return told
