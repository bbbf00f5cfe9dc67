"""How near whole steps come to what the GPU can do. Needs torch, triton and safetensors, and a GPU.

    python -m benchmarks.gpu_step [MODEL] [--context 1024 8192] [--dtype bfloat16]

MODEL is the name of a shape, with random weights (smollm2-135m, llama-3.1-8b), or a directory.
Prints the roofs measured here (a copy, a matrix product), then, over those: the bandwidth of decode
steps by batch size and context, as graphs and launched kernel by kernel; the FLOP/s of prefill by
chunk; and what transfers reach. The bytes and FLOPs are those that no step can do without
(engine/step_work.py), the forward's time is the GPU's own, and a whole step's the wall clock's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from splitserve.config import EngineConfig
from splitserve.engine.attention.base import AttentionShape
from splitserve.engine.attention.triton_backend import TritonAttention
from splitserve.engine.batch import Chunk, SampleRow
from splitserve.engine.ceilings import measure
from splitserve.engine.gpu.decoder import GpuDecoder
from splitserve.engine.kv_cache import DTYPES
from splitserve.engine.loading import with_gpu_cache
from splitserve.engine.model_runner import ModelRunner
from splitserve.engine.models.config import read_config
from splitserve.engine.models.rope import Rope
from splitserve.engine.models.weights import Weights
from splitserve.engine.resolve import resolve, resolve_device
from splitserve.request import Sampling
from splitserve.wire.messages import Region
from splitserve.work import Ceilings, StepWork

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
# (tokens computed before, tokens of the chunk)
CHUNKS = ((0, 512), (0, 2048), (0, 8192), (8192, 2048))
TRANSFER_TOKENS = (64, 2048)
WARM_STEPS = 3
GREEDY = Sampling(max_tokens=1 << 20)
# config.json of models whose weights are made up here.
SHAPES: dict[str, dict[str, object]] = {
    "smollm2-135m": {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
    },
    "tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 260,
        "max_position_embeddings": 2048,
    },
}


def main() -> None:
    args = _arguments()
    began_at = time.perf_counter()
    runner = load(args)
    print(f"{args.model}, {runner.config.dtype}, {runner.num_blocks} blocks on {runner.device}")
    print(f"loaded in {time.perf_counter() - began_at:.1f} s")
    bench = Bench(runner, args.repeats)
    sizes = [(size, context) for context in args.context for size in args.batch]
    launched = {size: bench.decode(*size) for size in sizes}
    began_at = time.perf_counter()
    runner.warm_up()
    print(f"warmed up and captured in {time.perf_counter() - began_at:.1f} s")
    roofs = measure(DTYPES[runner.config.dtype], str(runner.device))
    peaks = f"{roofs.bytes_per_s / 1e12:.3f} TB/s, product {roofs.flops_per_s / 1e12:.1f} TFLOP/s"
    print(f"copy {peaks}")
    for (size, context), before in launched.items():
        name = f"decode, batch {size:2}, context {context:5}"
        show(f"{name}, launched", before, roofs)
        show(f"{name}, as a graph", bench.decode(size, context), roofs)
    for start, num_tokens in CHUNKS:
        timed = bench.prefill(start, num_tokens)
        show(f"prefill, {num_tokens:4} tokens behind {start:4}", timed, roofs)
    for num_tokens in TRANSFER_TOKENS:
        reads, writes = bench.transfer(num_tokens)
        print(f"{num_tokens} tokens: read {reads / 1e9:.2f} GB/s, written {writes / 1e9:.2f} GB/s")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda:0", help="cpu where Triton interprets: a trial")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCH_SIZES))
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--max-model-len", type=int, default=10_240)
    parser.add_argument("--num-blocks", type=int)
    parser.add_argument("--repeats", type=int, default=15)
    return parser.parse_args()


def load(args: argparse.Namespace) -> ModelRunner:
    config = EngineConfig(
        args.model,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        num_blocks=args.num_blocks,
        attention_backend="triton",
    )
    if args.model not in SHAPES:
        return ModelRunner.load(config, args.device)
    return random_runner(config, resolve_device(args.device))


class RandomWeights(Weights):
    """Weights of any checkpoint, made up as they are asked for."""

    def get(self, name: str, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self._dtype, device=self._device) * 0.02


def random_runner(asked: EngineConfig, device: torch.device) -> ModelRunner:
    with tempfile.TemporaryDirectory() as directory:
        text = json.dumps({"model_type": "llama", **SHAPES[asked.model]})
        Path(directory, "config.json").write_text(text)
        model, rope_config = read_config(Path(directory))
    limit = min(asked.max_model_len or model.max_positions, model.max_positions)
    config = resolve(replace(asked, max_model_len=limit), model, rope_config, device)
    heads = model.num_heads, model.num_kv_heads, model.head_dim
    dtype = DTYPES[config.dtype]
    attention = TritonAttention(AttentionShape(*heads, model.head_dim**-0.5), dtype)
    rope = Rope(rope_config, model.head_dim, limit, device)
    decoder = GpuDecoder(model, RandomWeights({}, dtype, device), rope, attention)
    return ModelRunner(with_gpu_cache(config, model, decoder, device))


@dataclass(frozen=True)
class Timed:
    """Medians of some steps, seconds."""

    forward_s: float  # of the GPU
    step_s: float  # from call to answer
    work: StepWork


class Bench:
    """Times steps of one runner. Blocks are scattered over the cache, which holds anything."""

    def __init__(self, runner: ModelRunner, repeats: int) -> None:
        self._runner, self._repeats = runner, repeats
        self._block_size = runner.layout.block_size

    def decode(self, size: int, context: int) -> Timed | None:
        """None where there is no room for it."""
        needed = -(-context // self._block_size)
        if needed * size > self._runner.num_blocks or context > self._runner.max_model_len:
            return None
        ids = self._ids(needed * size)
        chunks = [
            self._chunk(context - 1, context, ids[row * needed : (row + 1) * needed])
            for row in range(size)
        ]
        return self._timed(chunks)

    def prefill(self, start: int, num_tokens: int) -> Timed | None:
        end = start + num_tokens
        needed = -(-end // self._block_size)
        limits = self._runner.max_model_len, self._runner.num_blocks * self._block_size
        if end > min(limits) or num_tokens > self._runner.max_num_batched_tokens:
            return None
        return self._timed([self._chunk(start, end, self._ids(needed))])

    def transfer(self, num_tokens: int) -> tuple[float, float]:
        """Bytes a second of a read and of a write of all layers."""
        cache, layout = self._runner.kv_cache, self._runner.layout
        ids = self._ids(-(-num_tokens // self._block_size))
        box = Region(0, layout.num_layers, 0, num_tokens, 0, layout.num_kv_heads)
        data = cache.read(ids, box)
        reads_s, writes_s = [], []
        for _ in range(WARM_STEPS + self._repeats):
            began_at = time.perf_counter()
            cache.read(ids, box)
            read_at = time.perf_counter()
            cache.write(ids, box, data)
            reads_s.append(read_at - began_at)
            writes_s.append(time.perf_counter() - read_at)
        return data.nbytes / statistics.median(reads_s), data.nbytes / statistics.median(writes_s)

    def _timed(self, chunks: list[Chunk]) -> Timed:
        forwards_s, steps_s = [], []
        self._runner.take_spent()
        for _ in range(WARM_STEPS + self._repeats):
            began_at = time.perf_counter()
            self._runner.step(chunks)
            steps_s.append(time.perf_counter() - began_at)
            spent = self._runner.take_spent()
            forwards_s.append(spent.forward_s)
        median = statistics.median
        return Timed(median(forwards_s[WARM_STEPS:]), median(steps_s[WARM_STEPS:]), spent.work)

    def _chunk(self, start: int, end: int, ids: list[int]) -> Chunk:
        history = range(end)  # looked at in [start, end) only
        token_ids = [token % self._runner.vocab_size for token in history]
        row = SampleRow(GREEDY, 0, 0, end, token_ids)
        return Chunk(token_ids, start, end, ids, (row,))

    def _ids(self, count: int) -> list[int]:
        return random.Random(0).sample(range(self._runner.num_blocks), count)


def show(name: str, timed: Timed | None, roofs: Ceilings) -> None:
    if timed is None:
        print(f"{name}: no room")
        return
    bytes_per_s = timed.work.num_bytes / timed.forward_s
    flops_per_s = timed.work.num_flops / timed.forward_s
    print(
        f"{name}: {timed.forward_s * 1e3:.3f} ms (step {timed.step_s * 1e3:.3f} ms), "
        f"{bytes_per_s / 1e12:.3f} TB/s {bytes_per_s / roofs.bytes_per_s:.0%}, "
        f"{flops_per_s / 1e12:.1f} TFLOP/s {flops_per_s / roofs.flops_per_s:.0%}, "
        f"{timed.work.floor_s(roofs) / timed.forward_s:.0%} of the floor"
    )


if __name__ == "__main__":
    main()
