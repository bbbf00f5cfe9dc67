"""How long the engine takes for a decode step and for a prefill: no HTTP, no transfer.

    python benchmarks/engine_step.py MODEL_DIRECTORY [--threads 1 2] [--context 280]

Prints, for each number of threads, milliseconds a decode step (least and median of several) by
batch size, and tokens a second of prefill by prompt length.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from splitserve.config import EngineConfig
from splitserve.engine.batch import Chunk, SampleRow
from splitserve.engine.model_runner import ModelRunner
from splitserve.request import Sampling

BATCH_SIZES = (1, 4, 16, 32)
PROMPT_TOKENS = (256, 512)
GREEDY = Sampling(max_tokens=1 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--context", type=int, default=280, help="tokens behind a decode row")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    blocks = max(BATCH_SIZES) * (args.context // 16 + 2)
    config = EngineConfig(
        args.model,
        dtype=args.dtype,
        num_blocks=max(blocks, max(PROMPT_TOKENS) // 16),
        attention_backend=args.attention_backend,
    )
    started = time.perf_counter()
    runner = ModelRunner.load(config)
    print(f"loaded in {time.perf_counter() - started:.1f} s, {runner.config.dtype}")
    for num_threads in args.threads:
        torch.set_num_threads(num_threads)
        measure(runner, num_threads, args.context, args.repeats)


def measure(runner: ModelRunner, num_threads: int, num_tokens: int, repeats: int) -> None:
    for size in BATCH_SIZES:
        chunks = decode_rows(runner, size, num_tokens)
        least, median = timed(partial(runner.step, chunks), repeats)
        print(
            f"{num_threads} threads  decode, batch {size:2}: {least:6.1f} ms (median {median:.1f})"
        )
    for length in PROMPT_TOKENS:
        prompt = [prefill(runner, length)]
        least, median = timed(partial(runner.step, prompt), max(repeats // 3, 3))
        print(
            f"{num_threads} threads  prefill of {length}: {length / least * 1e3:6.0f} tokens/s"
            f" (median {length / median * 1e3:.0f})"
        )


def timed(step: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Least and median milliseconds of some calls, after two to warm up."""
    times = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        step()
        times.append((time.perf_counter() - started) * 1e3)
    return min(times[2:]), statistics.median(times[2:])


def decode_rows(runner: ModelRunner, size: int, num_tokens: int) -> list[Chunk]:
    """Rows of about `num_tokens` each, their blocks scattered over the cache."""
    rng = random.Random(0)
    ids = list(range(runner.num_blocks))
    rng.shuffle(ids)
    chunks = []
    for i in range(size):
        history = history_of(runner, num_tokens + i % 16)
        needed = -(-len(history) // runner.layout.block_size)
        blocks, ids = ids[:needed], ids[needed:]
        chunks.append(chunk_of(history, len(history) - 1, blocks))
    return chunks


def prefill(runner: ModelRunner, length: int) -> Chunk:
    return chunk_of(history_of(runner, length), 0, range(-(-length // runner.layout.block_size)))


def history_of(runner: ModelRunner, length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(runner.vocab_size) for _ in range(length)]


def chunk_of(history: list[int], start: int, blocks: range | list[int]) -> Chunk:
    row = SampleRow(GREEDY, 0, 0, len(history), history)
    return Chunk(history, start, len(history), blocks, (row,))


if __name__ == "__main__":
    main()
