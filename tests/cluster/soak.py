"""Soak: many mixed requests with aborts on pools so small that every block is used again and again,
then a suite of prompts that was asked before: each answer has to be what it was then."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.clients import Abortable, Outcome, ask, prompt
from tests.cluster.faulty import FaultyRing, faulty, tiny_faulty
from tests.cluster.harness import Body

NUM_BLOCKS = 24
BLOCK_SIZE = 16
SUITE_SIZE = 50
NUM_CLIENTS = 24
ABORT_SHARE = 0.3
LONGEST_WAIT_S = 0.3  # before an abort
CHECK_EVERY = 100
FLAGS: dict[str, Any] = {"prefill": 2, "decode": 2, "num_blocks": NUM_BLOCKS, "max_model_len": 256}


@dataclass(slots=True)
class Report:
    """What a soak has come to."""

    counts: Counter[str] = field(default_factory=Counter)
    num_reuses: float = 0.0  # of the blocks of the decode worker that reused them least
    num_preemptions: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        return [
            f"requests: {dict(self.counts)}",
            f"each decode block was used {self.num_reuses:.0f} times or more; "
            f"{self.num_preemptions} preemptions",
            *(f"FAULT {fault}" for fault in self.faults),
        ]


def run(num_requests: int, seed: int = 0, model: Path | None = None) -> Report:
    """Soak a cluster of its own, with a tiny random model unless told otherwise."""
    report, chance = Report(), random.Random(seed)
    with _cluster(model) as ring:
        suite = [_suite_body(number) for number in range(SUITE_SIZE)]
        right = [outcome.token_ids for outcome in _ask_all(ring, suite)]
        mixed = [_mixed_body(number, chance) for number in range(num_requests)]
        fates = [chance.random() < ABORT_SHARE for _ in mixed]
        for start in range(0, num_requests, CHECK_EVERY):
            some = slice(start, start + CHECK_EVERY)
            report.counts += _soak(ring, list(zip(mixed[some], fates[some], strict=True)), seed)
            report.faults += _miscounted(ring)
        report.faults += [f"{n} x {kind}" for kind, n in report.counts.items() if kind not in FINE]
        for number, (outcome, was) in enumerate(zip(_ask_all(ring, suite), right, strict=True)):
            if outcome.token_ids != was:
                report.faults.append(
                    f"prompt {number} of the suite: {outcome.token_ids}, was {was}"
                )
        ring.assert_drained()
        decoded = [w["num_tokens_decoded"] for w in ring.ready("decode")]
        received = [w["num_kv_bytes_received"] for w in ring.ready("decode")]
        total = sum(received) / _token_bytes(ring, suite) + sum(decoded)
        report.num_reuses = total / BLOCK_SIZE / NUM_BLOCKS / len(decoded)
        report.num_preemptions = ring.total("decode", "num_preemptions")
    return report


FINE = ("whole", "aborted")


@contextmanager
def _cluster(model: Path | None) -> Iterator[FaultyRing]:
    if model is None:
        with tiny_faulty(**FLAGS) as ring:
            yield ring
    else:
        with faulty(model, **FLAGS) as ring:
            yield ring


def _suite_body(number: int) -> Body:
    return {"prompt": prompt(5000 + number, 5 + 3 * number), "max_tokens": 24}


def _mixed_body(number: int, chance: random.Random) -> Body:
    body: Body = {"prompt": prompt(number, chance.randint(1, 150))}
    body |= {"max_tokens": chance.randint(1, 60), "stream": chance.random() < 0.5}
    if chance.random() < 0.5:
        body |= {"temperature": 1.0, "seed": number}
    if chance.random() < 0.2:
        body["n"] = 2
    return body


def _ask_all(ring: FaultyRing, bodies: list[Body]) -> list[Outcome]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda body: ask(ring.base_url, body), bodies))


def _soak(ring: FaultyRing, some: list[tuple[Body, bool]], seed: int) -> Counter[str]:
    def run_one(one: tuple[Body, bool]) -> str:
        body, is_aborted = one
        if not is_aborted:
            return ask(ring.base_url, body).kind
        request = Abortable(ring.base_url, {**body, "ignore_eos": True})
        time.sleep(random.Random(f"{seed} {body['prompt']}").uniform(0, LONGEST_WAIT_S))
        request.abort()
        return "aborted"

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        return Counter(pool.map(run_one, some))


def _miscounted(ring: FaultyRing) -> list[str]:
    """Workers whose blocks are not each in one state."""
    found = []
    for worker in ring.cluster_alive():
        parts = [worker[f"num_blocks_{s}"] for s in ("free", "used", "cached", "reserved")]
        if sum(parts) != worker["num_blocks_total"] or min(parts) < 0:
            found.append(f"{worker['worker_id']} has {parts} of {worker['num_blocks_total']}")
    return found


def _token_bytes(ring: FaultyRing, suite: list[Body]) -> float:
    """What the KV of a token is on the wire: one request, measured."""
    body = {**suite[0], "temperature": 0, "return_timing": True, "ignore_eos": True}
    timing = ring.complete(body.pop("prompt"), **body)["timing"]
    return float(timing["num_kv_bytes"] / len(suite[0]["prompt"]))
