"""How long the engine takes for a step, and how far that is from what is possible.

    python -m benchmarks.engine_step [MODEL] [--threads 1 2] [--context 280] [--stages]

No HTTP, no transfer. For each number of threads, decode by batch size and prefill by prompt length:
the least and the median time of several, and the least over two floors:

- roof: all bytes the step has to move at the copy bandwidth, or all its FLOPs at the matmul peak,
  whichever takes longer; both measured on the spot (splitserve/engine/ceilings.py).
- parts: the step's own linears, each by the fastest kernel there is for it alone (this engine's, or
  oneDNN's with packed weights), and KV at the copy bandwidth. In prefill also attention's FLOPs at
  the matmul peak, which no kernel can do without.

With --stages, where the time of the least one went (the compiled pass only).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from splitserve.config import EngineConfig
from splitserve.engine.batch import Chunk, SampleRow
from splitserve.engine.ceilings import measure as measure_ceilings
from splitserve.engine.cpu.decoder import CpuDecoder
from splitserve.engine.kv_cache import DTYPES
from splitserve.engine.model_runner import ModelRunner
from splitserve.engine.models.config import read_config
from splitserve.engine.models.layers import Linear
from splitserve.models import resolve_model
from splitserve.request import Sampling
from splitserve.work import Ceilings

BATCH_SIZES = (1, 4, 16, 32, 64)
PROMPT_TOKENS = (256, 512, 2048)
GREEDY = Sampling(max_tokens=1 << 20)
HEAD = "LM head"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="a directory or an alias")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--context", type=int, default=280, help="tokens behind a decode row")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--stages", action="store_true")
    args = parser.parse_args()
    config = EngineConfig(
        str(resolve_model(args.model).directory),
        dtype=args.dtype,
        num_blocks=max(max(BATCH_SIZES) * (args.context // 16 + 2), max(PROMPT_TOKENS) // 16),
        attention_backend=args.attention_backend,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    started = time.perf_counter()
    runner = ModelRunner.load(config)
    print(f"loaded in {time.perf_counter() - started:.1f} s, {runner.config.dtype}\n")
    print("| threads | step | least ms | median | of the roof | of its parts |")
    print("| --- | --- | --- | --- | --- | --- |")
    for num_threads in args.threads:
        torch.set_num_threads(num_threads)
        measure(runner, num_threads, args)


def measure(runner: ModelRunner, num_threads: int, args: argparse.Namespace) -> None:
    roofs = measure_ceilings(DTYPES[runner.config.dtype])
    steps = [(f"decode, batch {n}", decode_rows(runner, n, args.context)) for n in BATCH_SIZES]
    steps += [(f"prefill of {n}", [prefill(runner, n)]) for n in PROMPT_TOKENS]
    for name, chunks in steps:
        repeats = args.repeats if name.startswith("decode") else max(args.repeats // 3, 3)
        runner.take_spent()
        least_ms, median_ms, stages = timed_stages(runner, chunks, repeats)
        roof_s = runner.take_spent().work.floor_s(roofs) / (repeats + 2)  # passes
        parts_s = parts_floor_s(runner, chunks, stages, roofs)
        print(
            f"| {num_threads} | {name} | {least_ms:.1f} | {median_ms:.1f}"
            f" | {least_ms / roof_s / 1e3:.2f} | {least_ms / parts_s / 1e3:.2f} |",
            flush=True,
        )
        if args.stages:
            print("  " + ", ".join(f"{stage} {s * 1e3:.1f}" for stage, s in stages.items()))


def timed_stages(
    runner: ModelRunner, chunks: list[Chunk], repeats: int
) -> tuple[float, float, dict[str, float]]:
    """`timed`, and the seconds of each stage: the least it took in any of the passes."""
    stages: dict[str, float] = {}

    def step() -> None:
        runner.step(chunks)
        if isinstance(runner._decoder, CpuDecoder):
            for name, seconds in seconds_by_stage(runner._decoder).items():
                stages[name] = min(seconds, stages.get(name, seconds))

    return *timed(step, repeats), stages


def seconds_by_stage(decoder: CpuDecoder) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, _, duration_s in decoder.operations():
        sums[name] = sums.get(name, 0.0) + duration_s
    return sums


def parts_floor_s(
    runner: ModelRunner, chunks: list[Chunk], stages: dict[str, float], roofs: Ceilings
) -> float:
    """Seconds of the linears by the faster of two kernels, KV at bandwidth, and in prefill
    attention's matrix products at the peak."""
    work, layout = runner.work_model, runner.layout
    num_rows = sum(chunk.end - chunk.start for chunk in chunks)
    num_kv_tokens = sum(chunk.end for chunk in chunks)
    linears_s = 0.0
    for name, (rows, columns) in shapes(runner).items():
        num_layers, x_rows = (1, len(chunks)) if name == HEAD else (layout.num_layers, num_rows)
        known_s = stages.get(name, float("inf"))
        linears_s += min(known_s, linear_s(rows, columns, num_layers, x_rows, runner))
    floor_s = linears_s + num_kv_tokens * layout.token_bytes / roofs.bytes_per_s
    num_pairs = sum(
        (chunk.end - chunk.start) * (chunk.start + chunk.end + 1) // 2
        for chunk in chunks
        if chunk.end - chunk.start > 1
    )
    return floor_s + num_pairs * work.pair_flops / roofs.flops_per_s


def shapes(runner: ModelRunner) -> dict[str, tuple[int, int]]:
    """[out, in] of the linears, named as the compiled pass names its stages."""
    model, _ = read_config(Path(runner.config.model))
    inner = model.num_heads * model.head_dim
    qkv = inner + 2 * model.num_kv_heads * model.head_dim
    return {
        "qkv linear": (qkv, model.hidden_size),
        "output linear": (model.hidden_size, inner),
        "gate and up linear": (2 * model.intermediate_size, model.hidden_size),
        "down linear": (model.hidden_size, model.intermediate_size),
        HEAD: (model.vocab_size, model.hidden_size),
    }


def linear_s(rows: int, columns: int, num_layers: int, x_rows: int, runner: ModelRunner) -> float:
    """Seconds of one such linear in every layer, by oneDNN with packed weights; the least of 5."""
    dtype = DTYPES[runner.config.dtype]
    linears = [Linear(torch.randn(rows, columns).to(dtype)) for _ in range(num_layers)]
    x = torch.randn(x_rows, columns).to(dtype)

    def all_layers() -> None:
        for linear in linears:
            linear(x)

    with torch.inference_mode():
        return timed(all_layers, 5)[0] / 1e3


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
