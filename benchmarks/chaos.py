"""Ten minutes of chaos: 2 prefill and 2 decode workers, a signal every 3 s, 8 clients.

    python -m benchmarks.chaos [--minutes 10] [--seed N]

Prints how many requests were answered right, how many ended in an error, and which. The exit code
is 1 when one was lost, or something has leaked.
"""

from __future__ import annotations

import argparse
import secrets
import sys

from tests.cluster.chaos import run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 30))
    arguments = parser.parse_args()
    print(f"{arguments.minutes:g} minutes of chaos, seed {arguments.seed}", flush=True)
    report = run(60 * arguments.minutes, arguments.seed)
    print("\n".join(report.lines))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
