"""`python -m tests.simulation SEED` shows one run; `--seeds FIRST LAST` tries many."""

from __future__ import annotations

import argparse
import logging
import re
import sys
import time
import traceback
from collections import Counter

from tests.simulation.process import WrongKVRead
from tests.simulation.run import Outcome, run_seed


def main() -> int:
    """0 when every seed held."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", nargs="?", type=int, help="a run to be shown, event by event")
    parser.add_argument("--seeds", nargs=2, type=int, metavar=("FIRST", "LAST"))
    parser.add_argument("--for-s", type=float, default=float("inf"), help="stop after this long")
    arguments = parser.parse_args()
    if arguments.seeds is not None:
        first, last = arguments.seeds
        return run_many(first, last, arguments.for_s)
    if arguments.seed is None:
        parser.error("give a seed, or --seeds FIRST LAST")
    form = "%(name)36s: %(message)s"
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format=form)
    print(_line(run_seed(arguments.seed, print)))
    return 0


def run_many(first: int, last: int, for_s: float) -> int:
    """Every seed from first to before last; those that fail are told with their traceback."""
    logging.disable(logging.CRITICAL)
    verdicts: Counter[str] = Counter()
    strikes: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    failed: list[int] = []
    until = time.monotonic() + for_s
    for seed in range(first, last):
        if time.monotonic() > until:
            last = seed
            break
        if seed % 500 == 0:
            print(f"... {seed}", flush=True)
        try:
            outcome = run_seed(seed)
        except (Exception, WrongKVRead):
            failed.append(seed)
            print(f"\nseed {seed} failed")
            traceback.print_exc(limit=-2)
            continue
        verdicts += outcome.verdicts
        strikes += outcome.strikes
        errors.update(
            re.sub(r"\b(prefill|decode)-\d+-\w+", r"\1-#", text) for text in outcome.errors
        )
    print(f"\nseeds {first} to {last - 1}: {len(failed)} failed {failed or ''}")
    print(f"requests: {dict(verdicts)}; strikes: {dict(strikes)}")
    for text, number in errors.most_common(10):
        print(f"{number:6} x {text}")
    return 1 if failed else 0


def _line(outcome: Outcome) -> str:
    kind = "gentle" if outcome.is_gentle else "hard"
    held = f"seed {outcome.seed} ({kind}) held"
    numbers = f"{dict(outcome.verdicts)}, {dict(outcome.strikes)}, {outcome.num_events} events"
    return f"{held}: {numbers}"


if __name__ == "__main__":
    sys.exit(main())
