"""Do remedies give what they promise? Profile a load, apply the first remedy, measure again.

    python -m benchmarks.remedies [--model smollm2-135m] [--duration 12] [--only batching kernels]

Three pairs, one thread for each worker. Prints what was predicted beside what was found (tokens/s
of the pool, by its workers' counters, while the profile ran), and where all time went.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx

from benchmarks.attribution import HEADING, attribution, watch
from splitserve import Cluster
from splitserve.bench import BenchSpec, make_prompts, request_body
from splitserve.bench_http import post, target_of
from splitserve.config import Role
from splitserve.profiling.collected import Profile
from splitserve.profiling.ideas import FASTER_KERNELS
from splitserve.profiling.verdict import WorkerVerdict, worker_verdicts

COUNTERS: dict[Role, str] = {"prefill": "num_tokens_prefilled", "decode": "num_tokens_decoded"}
FLOWS_WITHIN_S = 120.0
SETTLE_S = 2.0  # then the windows are those of the load


@dataclass(frozen=True, slots=True)
class Run:
    """A load, and the flags of the cluster that meets it."""

    spec: BenchSpec
    flags: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pair:
    """A bottleneck of one pool, and the run with its remedy applied."""

    role: Role
    load: str
    remedy: str  # how the title of the applied one begins
    before: Run
    after: Run


EIGHT = {"decode_max_num_seqs": 8}
ONE_ANSWER = BenchSpec(num_requests=64, prompt_tokens=32, output_tokens=512, concurrency=1)
ANSWERS = replace(ONE_ANSWER, concurrency=8)
LATER_ANSWERS = replace(ANSWERS, prompt_tokens=256)
PROMPTS = replace(ONE_ANSWER, prompt_tokens=512, output_tokens=1, concurrency=4)
PAIRS = {
    "batching": Pair(
        "decode",
        "1 client, then 8",
        "more requests at once for each decode worker",
        Run(ONE_ANSWER, EIGHT),
        Run(ANSWERS, EIGHT),
    ),
    "compute": Pair(
        "prefill",
        "512-token prompts, 4 clients; 1 prefill worker, then 2",
        "more prefill workers",
        Run(PROMPTS, {}),
        Run(PROMPTS, {"prefill": 2}),
    ),
    "kernels": Pair(
        "decode",
        "8 clients; reference attention, then auto",
        FASTER_KERNELS,
        Run(LATER_ANSWERS, {**EIGHT, "decode_attention_backend": "reference"}),
        Run(LATER_ANSWERS, {**EIGHT, "decode_attention_backend": "auto"}),
    ),
}


@dataclass(frozen=True, slots=True)
class Observed:
    """What a profile said while a load ran, and how much the pool did meanwhile."""

    profile: Profile
    tokens_per_s: float

    def verdict(self, role: Role) -> WorkerVerdict:
        return next(v for v in worker_verdicts(self.profile) if v.facts.role == role)


@asynccontextmanager
async def load(base_url: str, model: str, spec: BenchSpec) -> AsyncIterator[None]:
    """Clients who each ask again as soon as they have their answer."""
    target = target_of(base_url, "/v1/completions", None)
    bodies = itertools.cycle(request_body(spec, model, prompt) for prompt in make_prompts(spec))

    async def client() -> None:
        for body in bodies:
            reply = await post(target, body, spec.timeout_s)
            assert reply.status == 200, reply.parts

    clients = [asyncio.create_task(client()) for _ in range(spec.concurrency or 1)]
    try:
        yield
    finally:
        for task in clients:
            task.cancel()
        for ended in await asyncio.gather(*clients, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError), ended


def counted(base_url: str, role: Role) -> dict[str, tuple[float, int, int]]:
    """Of each worker of a pool when it counted its tokens, how many, and how many are in work."""
    workers = httpx.get(f"{base_url}/cluster").json()["workers"]
    now = time.monotonic()
    return {
        w["worker_id"]: (now - w["heartbeat_age_s"], w[COUNTERS[role]], w["num_requests_running"])
        for w in workers
        if w["role"] == role
    }


async def flowing(base_url: str, role: Role, num_clients: int) -> None:
    """Until each client's answer is being decoded, or prompts are computed."""
    deadline = time.monotonic() + FLOWS_WITHIN_S
    while time.monotonic() < deadline:
        workers = counted(base_url, role).values()
        if all(tokens for _, tokens, _ in workers):
            if role == "prefill" or sum(running for *_, running in workers) == num_clients:
                return await asyncio.sleep(SETTLE_S)
        await asyncio.sleep(0.2)
    raise AssertionError(f"no load on {role} within {FLOWS_WITHIN_S:g} s")


async def observed(url: str, model: str, role: Role, spec: BenchSpec, time_s: float) -> Observed:
    async with load(url, model, spec):
        await flowing(url, role, spec.concurrency or 1)
        before = counted(url, role)
        profile = await asyncio.to_thread(watch, url, time_s)
        after = counted(url, role)
    rates = [(after[w][1] - before[w][1]) / (after[w][0] - before[w][0]) for w in before]
    return Observed(profile, sum(rates))


def measure(model: str, role: Role, run: Run, duration_s: float) -> Observed:
    flags = {"prefill": 1, "decode": 1, "num_threads": 1, "dtype": "bfloat16", **run.flags}
    with Cluster(model, **flags) as cluster:
        name = cluster.client().model
        return asyncio.run(observed(cluster.base_url, name, role, run.spec, duration_s))


def row(pair: Pair, before: Observed, after: Observed) -> str:
    """A prediction is only compared with what was found when it was of the remedy applied."""
    verdict = before.verdict(pair.role)
    first = verdict.remedies[0]
    found = after.tokens_per_s / before.tokens_per_s
    ratio, applied = "", f"no: {pair.remedy} (not advised)"
    for place, remedy in enumerate(verdict.remedies, 1):
        if remedy.title.startswith(pair.remedy):
            ratio = f"{found / remedy.speedup:.2f}" if place == 1 else ""
            asked = f"{pair.remedy} (number {place}: {remedy.speedup:.2f})"
            applied = "yes" if place == 1 else f"no: {asked}"
    cells = [
        pair.load,
        f"{verdict.bottleneck} ({verdict.num_said_so} of {verdict.num_windows} windows)",
        f"{first.title} | {first.speedup:.2f}",
        f"{before.tokens_per_s:.1f} to {after.tokens_per_s:.1f} tokens/s: {found:.2f}",
    ]
    return f"| {' | '.join(cells)} | {ratio} | {applied} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--duration", type=float, default=12.0, help="seconds of each profile")
    parser.add_argument("--only", nargs="+", choices=PAIRS, default=list(PAIRS))
    arguments = parser.parse_args()
    rows, shares = [], []
    for name in arguments.only:
        pair, seen = PAIRS[name], []
        for when, one in (("before", pair.before), ("after", pair.after)):
            seen.append(measure(arguments.model, pair.role, one, arguments.duration))
            print(f"{name}, {when}: {seen[-1].tokens_per_s:.1f} tokens/s", flush=True)
            for worker in seen[-1].profile.workers:
                shares.append(f"| {name}, {when} | {worker.facts.role} | {attribution(worker)} |")
        rows.append(row(pair, *seen))
    print("\n| load | verdict | first remedy | predicted | found | found / predicted | applied |")
    print("| --- | --- | --- | --- | --- | --- | --- |", *rows, sep="\n")
    print(f"\n{HEADING}", *shares, sep="\n")


if __name__ == "__main__":
    main()
