"""What the step log costs a decode step.

    python -m benchmarks.step_log [MODEL] [--batch 16] [--context 256] [--threads 1] [--pairs 100]

First the time of everything that records in a turn of a decode loop, against the time of its step;
then the loop with the recording and without it, in turns. Without MODEL a tiny one is made, which
shows that the script works, no more.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from functools import partial

import numpy as np

from benchmarks.engine_step import timed
from benchmarks.recorded_turn import OFF, Recording, plan_of, recorded_by, recording, turn
from splitserve.config import EngineConfig
from splitserve.engine.batch import build_batch
from splitserve.engine.model_runner import ModelRunner
from splitserve.engine.step import chunk_of, compute
from splitserve.models import resolve_model
from splitserve.scheduling.chunking import Planned
from splitserve.wire import messages as m
from tests.tiny_models import make_tiny_llama

NUM_ROUNDS = 9


def cost_s(runner: ModelRunner, plan: list[Planned], num_steps: int, is_watched: bool) -> float:
    """Seconds of a turn beside its step: mean of `num_steps`, median of several such rounds.

    Real steps run in between, not timed: they leave the caches as they do in a worker.
    """
    parts, step_s = recording(runner), 0.0
    batch = build_batch([chunk_of(planned) for planned in plan], runner.layout.block_size)

    def step() -> None:
        nonlocal step_s
        started = time.perf_counter()
        compute(runner, plan)
        step_s += time.perf_counter() - started
        for part in ("prepare", "forward", "sample"):
            with parts.meter.during(part):
                pass
        lengths = batch.query_lens, batch.context_lens
        parts.meter.did(parts.work_model.of(*lengths, len(batch.logits_rows)))

    if is_watched:
        parts.observer.begin(m.Observe("", 1e9), time.monotonic())
    rounds = []
    with recorded_by(runner, OFF):
        for _ in range(NUM_ROUNDS):
            step_s, started = 0.0, time.perf_counter()
            for _ in range(num_steps):
                turn(parts, plan, step)
            rounds.append((time.perf_counter() - started - step_s) / num_steps)
    return statistics.median(rounds)


def paired(runner: ModelRunner, plan: list[Planned], num_pairs: int, num_steps: int) -> list[float]:
    """Time with the recording over time without it, pair by pair: on off, off on, on off, ..."""
    on, step = recording(runner), partial(compute, runner, plan)

    def seconds(parts: Recording) -> float:
        with recorded_by(runner, parts):
            started = time.perf_counter()
            for _ in range(num_steps):
                turn(parts, plan, step)
            return time.perf_counter() - started

    ratios = []
    for number in range(num_pairs):
        order = (on, OFF) if number % 2 == 0 else (OFF, on)
        took_s = {id(parts): seconds(parts) for parts in order}
        ratios.append(took_s[id(on)] / took_s[id(OFF)])
    return ratios


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % of the medians of 10,000 bootstrap samples lie between these."""
    draws = np.random.default_rng(0).choice(np.array(ratios), (10_000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return float(low), float(high)


def measure(directory: str, arguments: argparse.Namespace) -> None:
    batch, context = arguments.batch, arguments.context
    num_blocks = batch * (context // 16 + 2)
    config = EngineConfig(directory, num_blocks=num_blocks, num_threads=arguments.threads)
    runner = ModelRunner.load(config)
    plan = plan_of(runner, batch, context)
    least_ms, median_ms = timed(partial(compute, runner, plan), 20)
    print(f"a decode step of {batch}: {least_ms:.2f} ms (median {median_ms:.2f})", flush=True)
    for name, is_watched in (("always", False), ("while a profile watches", True)):
        cost_ms = 1e3 * cost_s(runner, plan, max(1, round(1e3 / median_ms)), is_watched)
        share = 100 * cost_ms / least_ms
        print(f"recording, {name}: {1e3 * cost_ms:.1f} us a step, {share:.3f} % of it", flush=True)
    num_steps = max(1, round(1e3 * arguments.turn_s / median_ms))
    ratios = paired(runner, plan, arguments.pairs, num_steps)
    low, high = interval(ratios)
    print(
        f"on over off, {len(ratios)} pairs of {num_steps} steps each: median"
        f" {statistics.median(ratios):.4f}, 95 % of it in {low:.4f} to {high:.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a directory or an alias")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=256, help="tokens behind a decode row")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--turn-s", type=float, default=0.2, help="seconds of each half of a pair")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        named = arguments.model and resolve_model(arguments.model).directory
        measure(str(named or make_tiny_llama(folder)), arguments)


if __name__ == "__main__":
    main()
