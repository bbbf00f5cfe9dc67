"""Milliseconds a step spends on sampling, by kind of row: `python benchmarks/sampler.py`."""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from splitserve.engine.batch import SampleRow
from splitserve.engine.sampler import sample
from splitserve.request import Sampling

KINDS = {
    "greedy": Sampling(16),
    "greedy, 5 logprobs": Sampling(16, logprobs=5),
    "greedy, penalties": Sampling(16, frequency_penalty=0.5, repetition_penalty=1.1),
    "temperature": Sampling(16, temperature=1.0),
    "top_k 50": Sampling(16, temperature=1.0, top_k=50),
    "top_p 0.9": Sampling(16, temperature=1.0, top_p=0.9),
    "min_p 0.05": Sampling(16, temperature=1.0, min_p=0.05),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=50)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    # A steep distribution, as language models have: the nucleus of 0.9 is some tens of tokens.
    logits = torch.randn(arguments.rows, arguments.vocab) * 2.0
    logits[:, :40] += 12.0
    logits = logits.to(arguments.device, getattr(torch, arguments.dtype))
    history = list(range(300))
    for name, sampling in KINDS.items():
        rows = [SampleRow(sampling, 7, i, 200, history) for i in range(arguments.rows)]
        sample(logits, rows)
        seconds = []
        for _ in range(arguments.repeats):
            start = time.perf_counter()
            sample(logits, rows)
            seconds.append(time.perf_counter() - start)
        print(f"{name:<20} {statistics.median(seconds) * 1e3:8.2f} ms")


if __name__ == "__main__":
    main()
