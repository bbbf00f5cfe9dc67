"""How much a sequence's logits change with how, where and beside what they are computed.

    python -m benchmarks.row_independence [MODEL] [--dtypes bfloat16 float32] [--threads 1 2]

Texts of several lengths, each a prompt and a few tokens behind it that are known beforehand. The
logits behind the prompt and behind each of those tokens are probed: first with the prompt computed
at once, the tokens as decode rows, all alone; then in other ways. For every number format and way:
the largest change of any logit of any probed row, and how many of the rows are not equal to the
bit. Everything runs on the last of `--threads` threads, but for the ways that name another number.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.engine_step import chunk_of, decode_rows
from benchmarks.quality import FORMATS, TEXT, load
from splitserve.engine.batch import Chunk
from splitserve.engine.model_runner import ModelRunner
from splitserve.models import resolve_model
from splitserve.tokenizer import Tokenizer

PROMPT_TOKENS = (40, 129, 256, 600)
NUM_TOKENS_BEHIND = 4
NUM_MATES, MATE_TOKENS, MATE_CHUNK = 31, 60, 4
CACHE_TOKENS = 6144


@dataclass(frozen=True, slots=True)
class Way:
    """A way to compute a sequence."""

    num_mates: int = 0
    place: float = 0.0  # among its mates: 0 the first, 1 the last
    chunk_tokens: int = CACHE_TOKENS  # of the prompt, at once
    num_prefilled: int = 0  # tokens behind the prompt that are computed as if they were in it
    as_chunk: bool = False  # tokens behind it: the last of a chunk, not decode rows
    elsewhere: bool = False  # in other blocks of the cache
    num_threads: int | None = None


WAYS = {
    "the same again": Way(),
    "beside 3 others": Way(num_mates=3),
    "beside 15 others": Way(num_mates=15),
    "beside 31 others": Way(num_mates=31),
    "beside 15, in the middle": Way(num_mates=15, place=0.5),
    "beside 15, the last": Way(num_mates=15, place=1.0),
    "prompt in chunks of 16": Way(chunk_tokens=16),
    "prompt in chunks of 64": Way(chunk_tokens=64),
    "prompt in chunks of 100": Way(chunk_tokens=100),
    "decode rows in chunks of 2 to 5": Way(as_chunk=True),
    "decode rows in the prompt's chunk": Way(num_prefilled=NUM_TOKENS_BEHIND),
    "computed again, elsewhere": Way(num_prefilled=NUM_TOKENS_BEHIND // 2, elsewhere=True),
}


@dataclass(frozen=True, slots=True)
class Probe:
    """A text and the blocks it may be computed in, of which it needs half."""

    token_ids: list[int]
    block_ids: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids) - NUM_TOKENS_BEHIND


@dataclass(slots=True)
class Change:
    """Of the probed rows, between two ways."""

    largest: float = 0.0
    num_rows: int = 0
    num_different: int = 0

    def add(self, found: Tensor, expected: Tensor) -> None:
        self.largest = max(self.largest, float((found - expected).abs().max()))
        self.num_rows += 1
        self.num_different += not torch.equal(found, expected)

    def __str__(self) -> str:
        share = f"{self.num_different} of {self.num_rows}"
        return f"{self.largest:.1e}, {share}" if self.num_different else f"0 of {self.num_rows}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="a directory or an alias")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    directory = resolve_model(args.model).directory
    token_ids = list(Tokenizer(directory).encode(TEXT.read_text(encoding="utf-8")))
    ways = WAYS | {threads_name(n): Way(num_threads=n) for n in args.threads[:-1]}
    columns: dict[str, list[Change]] = {}
    for name, options in FORMATS.items():
        if options["dtype"] in args.dtypes:
            started = time.perf_counter()
            runner = load(directory, options, CACHE_TOKENS)
            columns[name] = measure(runner, token_ids, ways.values(), args.threads[-1])
            print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    print(f"\n| on {threads_name(args.threads[-1])} | {' | '.join(columns)} |")
    print("| --- " * (len(columns) + 1) + "|")
    for name, *changes in zip(ways, *columns.values(), strict=True):
        print(f"| {name} | {' | '.join(map(str, changes))} |")


def threads_name(num_threads: int) -> str:
    return f"{num_threads} thread{'s' * (num_threads > 1)}"


def measure(
    runner: ModelRunner, token_ids: list[int], ways: Iterable[Way], num_threads: int
) -> list[Change]:
    """What each way changes, in their order."""
    torch.set_num_threads(num_threads)
    mates = mates_of(runner)
    probes = list(probes_of(runner, token_ids, mates))
    usual = [logits_by_end(runner, probe, Way(), mates) for probe in probes]
    changes = []
    for way in ways:
        torch.set_num_threads(way.num_threads or num_threads)
        change = Change()
        for probe, expected in zip(probes, usual, strict=True):
            for end, found in logits_by_end(runner, probe, way, mates).items():
                change.add(found, expected[end])
        changes.append(change)
    return changes


def mates_of(runner: ModelRunner) -> list[Chunk]:
    """Decode rows, and every fourth the end of a prompt; their KV is in the cache."""
    rows = decode_rows(runner, NUM_MATES, MATE_TOKENS)
    runner.logits([replace(row, start=0) for row in rows])
    return [
        replace(row, start=row.end - MATE_CHUNK) if i % 4 == 3 else row
        for i, row in enumerate(rows)
    ]


def probes_of(runner: ModelRunner, token_ids: list[int], mates: list[Chunk]) -> Iterator[Probe]:
    taken = {block_id for mate in mates for block_id in mate.block_ids}
    free = [block_id for block_id in range(runner.num_blocks) if block_id not in taken]
    start = 0
    for num_prompt_tokens in PROMPT_TOKENS:
        end = start + num_prompt_tokens + NUM_TOKENS_BEHIND
        num_blocks = 2 * -(-(end - start) // runner.layout.block_size)
        block_ids, free = free[:num_blocks], free[num_blocks:]
        assert len(block_ids) == num_blocks, "the cache is too small"
        yield Probe(token_ids[start:end], block_ids)
        start = end


def logits_by_end(
    runner: ModelRunner, probe: Probe, way: Way, mates: list[Chunk]
) -> dict[int, Tensor]:
    """Logits [vocab] behind the prompt and the tokens after it, by the number of tokens up to
    there; some ways skip some."""
    blocks = probe.block_ids[way.elsewhere :: 2]
    place = round(way.place * way.num_mates)
    others = mates[: way.num_mates]
    found = {}
    for start, end in cuts(way, probe.num_prompt_tokens):
        own = chunk_of(probe.token_ids[:end], start, blocks)
        logits = runner.logits([*others[:place], own, *others[place:]])
        if end >= probe.num_prompt_tokens:
            found[end] = logits[place].float()
    return found


def cuts(way: Way, num_prompt_tokens: int) -> Iterator[tuple[int, int]]:
    """From where to where each pass goes."""
    prefilled = num_prompt_tokens + way.num_prefilled
    yield from pairwise([*range(0, prefilled, way.chunk_tokens), prefilled])
    for end in range(prefilled + 1, num_prompt_tokens + NUM_TOKENS_BEHIND + 1):
        yield num_prompt_tokens - 1 if way.as_chunk else end - 1, end


if __name__ == "__main__":
    main()
