"""Do the parts of a request's time add up? What clients measure against what `timing` says.

    python -m benchmarks.timing_sums [MODEL] [--base-url URL] [--requests 500] [--concurrency 4]

    first token: queue + prefill + delivery against the client's time to first token
    hand-off:    grant wait + transfer + decode wait + first step against the gap between tokens
                 0 and 1, as the coordinator and as the client saw it

Prints what is left over: by request (in percent of what the client measured), and over all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np

from splitserve import Cluster
from splitserve.bench import BenchSpec, make_prompts
from tests.cluster.timed import FIRST_TOKEN, HANDOFF, Timed, ask_timed


def show(name: str, parts: Sequence[str], seen: Sequence[Timed], measured: Sequence[float]) -> None:
    """A line: how much of what was measured the parts leave unexplained."""
    explained = np.array([one.sum_of(parts) for one in seen])
    whole = np.array(measured)
    left = whole - explained
    share = 100 * np.abs(left) / whole
    total = 100 * left.sum() / whole.sum()
    cells = (
        f"{1000 * np.median(whole):9.1f}  {np.median(share):6.2f}  {np.quantile(share, 0.95):6.2f}"
    )
    print(f"{name:34} {cells}  {share.max():6.2f}  {1000 * np.median(left):8.2f}  {total:6.2f}")


def report(seen: Sequence[Timed]) -> None:
    print(
        f"\n{len(seen)} requests" + " " * 24 + "median   |left over| of each, %      ms    of all"
    )
    print(f"{'':34}        ms  median     p95   worst    median       %")
    show("first token, client", FIRST_TOKEN, seen, [one.ttft_s for one in seen])
    told = [one for one in seen if None not in [one.timing[part] for part in HANDOFF]]
    gaps = [one.timing["handoff_gap_s"] for one in told]
    show("hand-off gap, coordinator", HANDOFF, told, gaps)
    show("hand-off gap, client", HANDOFF, told, [one.gap_s for one in told])
    for part in (*FIRST_TOKEN, *HANDOFF):
        print(f"  {part:14} median {1000 * np.median([one.timing[part] for one in told]):8.2f} ms")
    if len(told) < len(seen):
        print(f"  {len(seen) - len(told)} hand-offs were told of too late")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--base-url", help="a cluster that runs already")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=8)
    arguments = parser.parse_args()
    spec = BenchSpec(arguments.requests, arguments.prompt_tokens, arguments.output_tokens)
    bodies = [{"prompt": prompt, "max_tokens": spec.output_tokens} for prompt in make_prompts(spec)]
    own = Cluster(arguments.model, prefill=1, decode=1) if arguments.base_url is None else None
    with own or nullcontext():
        base_url = own.base_url if own is not None else arguments.base_url
        report(ask_timed(base_url, bodies, arguments.concurrency))


if __name__ == "__main__":
    main()
