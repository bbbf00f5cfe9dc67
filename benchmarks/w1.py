"""W1 in both modes: 32 requests, 256-token prompts, 64 output tokens, concurrency 16.

    python benchmarks/w1.py [MODEL] [--dtype bfloat16] [--repeat 1]

The aggregated mode (one decode worker that prefills for itself, all cores) and one prefill plus
one decode worker (half the cores each) take turns, so that both meet the same machine. Prints a
table for the README; run it with nothing else going on.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics

from splitserve import Cluster
from splitserve.bench import BenchSpec, Report, run_bench

SPEC = BenchSpec(num_requests=32, prompt_tokens=256, output_tokens=64, concurrency=16)
WARM_UP = BenchSpec(num_requests=2, prompt_tokens=256, output_tokens=8, concurrency=2, seed=1)
MODES = {"aggregated (0P1D)": (0, 1), "1P1D": (1, 1)}


def measure(model: str, dtype: str, num_workers: tuple[int, int]) -> Report:
    prefill, decode = num_workers
    with Cluster(model, prefill=prefill, decode=decode, dtype=dtype, max_model_len=2048) as cluster:
        name = cluster.client().model
        asyncio.run(run_bench(WARM_UP, cluster.base_url, name))
        return asyncio.run(run_bench(SPEC, cluster.base_url, name))


def row(mode: str, reports: list[Report]) -> str:
    def median(value: str, percentile: str) -> str:
        return f"{statistics.median(getattr(r, value)[percentile] for r in reports):.0f}"

    rate = statistics.median(report.output_tokens_per_s for report in reports)
    cells = [mode, f"{rate:.0f}"]
    cells += [f"{median('ttft_ms', 'p50')} / {median('ttft_ms', 'p95')}"]
    cells += [median("handoff_gap_ms", "p50"), median("tpot_ms", "p50"), median("itl_ms", "p99")]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeat", type=int, default=1)
    arguments = parser.parse_args()
    reports: dict[str, list[Report]] = {mode: [] for mode in MODES}
    for _ in range(arguments.repeat):
        for mode, num_workers in MODES.items():
            report = measure(arguments.model, arguments.dtype, num_workers)
            assert not report.errors, report.errors
            reports[mode].append(report)
            print(f"{mode}: {report.output_tokens_per_s:.1f} output tokens/s", flush=True)
    print(
        "\n| mode | output tokens/s | TTFT p50 / p95 ms | hand-off gap p50 | TPOT p50 | ITL p99 |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for mode, done in reports.items():
        print(row(mode, done))


if __name__ == "__main__":
    main()
