"""How near the Triton kernels come to what the GPU can do. Needs torch and triton, and a GPU.

    python -m benchmarks.gpu_kernels [--shape 32 8 128] [--context 1024 8192] [--dtype bfloat16]

Prints the peaks measured here (a copy, a matrix product), then, over those: the bandwidth of decode
attention by batch size and context, of KV gathered and scattered, and of norm, rope and activation;
and the FLOP/s of prefill attention by prompt length, beside torch's own attention over keys that
lie in one piece. What is timed is a CUDA graph over layers whose KV together is larger than the
caches of the GPU: no launches, no hits.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.cuda import Event

from splitserve.engine.attention.base import AttentionShape
from splitserve.engine.attention.triton_backend import TritonAttention
from splitserve.engine.batch import Batch, Chunk, build_batch
from splitserve.engine.triton_kernels.kv_copy import gather_kv, scatter_kv
from splitserve.engine.triton_kernels.rms_norm import add_rms_norm
from splitserve.engine.triton_kernels.rope import rotate
from splitserve.engine.triton_kernels.silu_and_mul import silu_and_mul

DEVICE = "cuda"
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
# (tokens computed before, tokens of the chunk)
CHUNKS = ((0, 512), (0, 2048), (0, 8192), (2048, 512), (7680, 512))
BLOCK_SIZE = 16
MORE_THAN_CACHES = 1 << 29  # bytes
MOST_LAYERS = 64


@dataclass(frozen=True)
class Peaks:
    bytes_per_s: float
    flops_per_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=int, nargs=3, default=[32, 8, 128], help="heads, KV, size")
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    num_heads, num_kv_heads, head_dim = args.shape
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, head_dim**-0.5)
    bench = Bench(shape, getattr(torch, args.dtype), args.repeats)
    with torch.inference_mode():
        print(f"{num_heads} heads, {num_kv_heads} KV heads of {head_dim}, {args.dtype}")
        peaks = bench.peaks()
        print(f"copy {peaks.bytes_per_s / 1e12:.2f} TB/s, product {peaks.flops_per_s / 1e12:.0f} T")
        for context in args.context:
            bench.decode(context, peaks)
        for start, num_tokens in CHUNKS:
            bench.prefill(start, num_tokens, peaks)
        bench.copies(peaks)
        bench.layers(peaks)


class Bench:
    """Times each kernel for one shape and dtype."""

    def __init__(self, shape: AttentionShape, dtype: torch.dtype, repeats: int) -> None:
        self._shape, self._dtype, self._repeats = shape, dtype, repeats
        self._token_bytes = 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize  # of a layer

    def peaks(self) -> Peaks:
        source = torch.zeros(1 << 30, dtype=torch.uint8, device=DEVICE)
        target = torch.empty_like(source)
        copy_s = self._timed(lambda: target.copy_(source))
        left, right = (torch.randn(8192, 8192, device=DEVICE).to(self._dtype) for _ in range(2))
        product_s = self._timed(lambda: left @ right)
        return Peaks(2 * source.numel() / copy_s, 2 * 8192**3 / product_s)

    def decode(self, context: int, peaks: Peaks) -> None:
        for size in BATCH_SIZES:
            batch = batch_of(((context - 1, context),) * size)
            num_bytes = size * context * self._token_bytes
            seconds = self._attention(batch, num_bytes)
            share = num_bytes / seconds / peaks.bytes_per_s
            print(
                f"decode, batch {size:2}, context {context:5}: {seconds * 1e6:8.1f} us, {share:.0%}"
            )

    def prefill(self, start: int, num_tokens: int, peaks: Peaks) -> None:
        end = start + num_tokens
        # Two products over the pairs of a query and a token it sees.
        pairs = (start + 1 + end) * num_tokens / 2
        flops = 4 * pairs * self._shape.num_heads * self._shape.head_dim
        batch = batch_of(((start, end),))
        share = flops / self._attention(batch, end * self._token_bytes) / peaks.flops_per_s
        told = f"prefill, {num_tokens:4} tokens behind {start:4}: {share:.0%}"
        if start == 0:
            told += f" (torch's: {flops / self._torch_attention(end) / peaks.flops_per_s:.0%})"
        print(told)

    def copies(self, peaks: Peaks) -> None:
        shape = self._shape
        for num_tokens in (256, 4096):
            num_layers = 32
            batch = batch_of(((0, num_tokens),))
            kv = self._layers(batch, num_layers)
            size = (num_layers, 2, num_tokens, shape.num_kv_heads, shape.head_dim)
            staging = torch.empty(size, dtype=self._dtype, device=DEVICE)
            num_bytes = 2 * num_layers * num_tokens * self._token_bytes
            for name, copy in (("gather", gather_kv), ("scatter", scatter_kv)):
                seconds = self._timed(partial(copy, kv, batch.slot_mapping, staging))
                print(f"{name}, {num_tokens} tokens: {num_bytes / seconds / peaks.bytes_per_s:.0%}")

    def layers(self, peaks: Peaks) -> None:
        num_tokens, size, num_heads, head_dim = 8192, 4096, 40, self._shape.head_dim
        x, residual = (torch.randn(num_tokens, size, device=DEVICE).to(self._dtype) for _ in "ab")
        gate_up = torch.randn(num_tokens, 2 * size, device=DEVICE).to(self._dtype)
        heads = torch.randn(num_tokens, num_heads, head_dim, device=DEVICE).to(self._dtype)
        weight = torch.ones(size, device=DEVICE)
        angles = (torch.zeros(num_tokens, 1, head_dim, device=DEVICE),) * 2
        numbers = {
            "norm after the residual": (lambda: add_rms_norm(x, residual, weight, 1e-5), 4 * size),
            "activation": (lambda: silu_and_mul(gate_up), 3 * size),
            "rope": (lambda: rotate(heads, angles), 2 * num_heads * head_dim),
        }
        for name, (kernel, per_token) in numbers.items():
            num_bytes = num_tokens * per_token * self._dtype.itemsize
            print(f"{name}: {num_bytes / self._timed(kernel) / peaks.bytes_per_s:.0%}")

    def _attention(self, batch: Batch, kv_bytes: int) -> float:
        """Seconds a layer."""
        num_layers = max(2, min(MORE_THAN_CACHES // kv_bytes, MOST_LAYERS))
        kv = self._layers(batch, num_layers)
        size = (len(batch.positions), self._shape.num_heads, self._shape.head_dim)
        query = torch.randn(size, device=DEVICE).to(self._dtype)
        plan = TritonAttention(self._shape, self._dtype).plan(batch)

        def every_layer() -> None:
            for layer_kv in kv:
                plan.attend(query, layer_kv)

        return self._timed(every_layer) / num_layers

    def _torch_attention(self, num_tokens: int) -> float:
        """Seconds of torch's kernel, over contiguous keys."""
        shape = self._shape
        query, key, value = (
            torch.randn(1, num_heads, num_tokens, shape.head_dim, device=DEVICE).to(self._dtype)
            for num_heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        )
        return self._timed(
            lambda: F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
        )

    def _layers(self, batch: Batch, num_layers: int) -> Tensor:
        num_blocks = int(batch.block_tables.max()) + 1
        size = (num_layers, 2, num_blocks, BLOCK_SIZE, self._shape.num_kv_heads)
        kv = torch.empty(*size, self._shape.head_dim, dtype=self._dtype, device=DEVICE)
        return kv.normal_()

    def _timed(self, work: Callable[[], object]) -> float:
        """Seconds of some work as a CUDA graph, median of some times, after two to warm up."""
        work()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        start, end = (Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        seconds: list[float] = []
        for _ in range(self._repeats + 2):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        return statistics.median(seconds[2:])


def batch_of(spans: tuple[tuple[int, int], ...]) -> Batch:
    """Chunks with blocks scattered over the cache."""
    needed = [-(-end // BLOCK_SIZE) for _, end in spans]
    ids = list(range(sum(needed)))
    random.Random(0).shuffle(ids)
    chunks = []
    for (start, end), count in zip(spans, needed, strict=True):
        chunks.append(Chunk(range(end), start, end, ids[:count]))
        ids = ids[count:]
    return build_batch(chunks, BLOCK_SIZE, DEVICE)


if __name__ == "__main__":
    main()
