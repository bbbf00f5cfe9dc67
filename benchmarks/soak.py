"""2,000 mixed requests, a third of them aborted, on pools of 24 blocks; then 50 prompts again.

    python -m benchmarks.soak [--requests 2000] [--seed N] [--model NAME]

The exit code is 1 when an answer to one of the 50 is not what it was before, or a block was lost.
"""

from __future__ import annotations

import argparse
import secrets
import sys

from splitserve.models import resolve_model
from tests.cluster.soak import run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 30))
    parser.add_argument("--model", help="instead of a tiny random one")
    arguments = parser.parse_args()
    print(f"{arguments.requests} requests, seed {arguments.seed}", flush=True)
    model = resolve_model(arguments.model).directory if arguments.model else None
    report = run(arguments.requests, arguments.seed, model)
    print("\n".join(report.lines))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
