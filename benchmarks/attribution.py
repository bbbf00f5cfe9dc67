"""Is all time accounted for? Phases of the step log against the clock, on both workers of 1P1D.

    python -m benchmarks.attribution [MODEL] [--dtype bfloat16]

Loads: W1 (splitserve/bench/workloads.py), and 8 prompts of 2,000 tokens with 16 tokens out. For
each worker the shares of the time between its first step and its last, and what no phase has a name
for: `other`, and what is missing from the sum of all phases by the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import threading

from splitserve import Cluster
from splitserve.bench import WORKLOADS, BenchSpec, Spec, run_bench
from splitserve.calls import address_of
from splitserve.profiling.collected import Collector, Profile, WorkerProfile
from splitserve.profiling.evidence import HOST_PHASES, PHASES
from splitserve.profiling.fetch import profile_stream

LONG_PROMPTS = BenchSpec(num_requests=8, prompt_tokens=2000, output_tokens=16, concurrency=4)
LOADS = {"W1": WORKLOADS["w1"], "long prompts": LONG_PROMPTS}
WARM_UP = BenchSpec(num_requests=2, prompt_tokens=256, output_tokens=8, concurrency=2, seed=1)
HEADING = (
    "| load | worker | steps | wall s | wait | KV wait | forward | host | unattributed |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)
MOST_S = 600.0  # of a profile
REPORTED_S = 1.0  # after it, what was computed has been reported


def attribution(worker: WorkerProfile) -> str:
    """Cells of a table: steps, seconds between the first row and the last, shares of them.

    The seconds are by the coordinator's clock, when it heard of those rows; the phases are by the
    worker's. Phases of a row begin when the row before it ended, so the first one is left out.
    """
    rows = worker.steps[1:]
    if not len(rows):
        return "fewer than 2 | | | | | | "
    wall_s = float(rows["ended_at"][-1] - worker.steps["ended_at"][0])
    shares = {phase: float(rows[f"{phase}_s"].sum()) / wall_s for phase in PHASES}
    host = sum(shares[phase] for phase in HOST_PHASES if phase != "other")
    cells = [shares["wait"], shares["kv_wait"], shares["forward"], host]
    text = " | ".join(f"{100 * share:.2f} %" for share in (*cells, 1 - sum(cells)))
    return f"{len(rows)} | {wall_s:.1f} | {text}"


def watch(base_url: str, duration_s: float, is_over: threading.Event | None = None) -> Profile:
    """What a cluster tells of itself for so long, or until something is over."""
    collector = Collector()
    with profile_stream(address_of(base_url, None), duration_s) as chunks:
        for chunk in chunks:
            collector.feed(chunk)
            if is_over is not None and is_over.is_set():
                break
    return collector.profile()


async def profiled(spec: Spec, base_url: str, model: str) -> Profile:
    """A cluster under a load that ends."""
    is_over = threading.Event()
    watching = asyncio.create_task(asyncio.to_thread(watch, base_url, MOST_S, is_over))
    report = await run_bench(spec, base_url, model)
    await asyncio.sleep(REPORTED_S)
    is_over.set()
    assert not report.errors, report.errors
    return await watching


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    print(HEADING)
    with Cluster(arguments.model, prefill=1, decode=1, dtype=arguments.dtype) as cluster:
        name = cluster.client().model
        asyncio.run(run_bench(WARM_UP, cluster.base_url, name))
        for load, spec in LOADS.items():
            profile = asyncio.run(profiled(spec, cluster.base_url, name))
            for worker in profile.workers:
                line = f"| {load} | {worker.facts.role} | {attribution(worker)} |"
                print(line, flush=True)


if __name__ == "__main__":
    main()
