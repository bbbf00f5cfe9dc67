"""Answers equal what transformers computes in float32, whichever way the cluster is split."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.cluster.harness import ONE_EACH, Body, Ring, ids_of
from tests.reference import Case, Verdict, compare, named_cases, prose_cases, tolerable

TOPOLOGIES = {
    "1P1D": ONE_EACH,
    "2P2D": {"prefill": 2, "decode": 2},
    "aggregated": {"prefill": 0, "decode": 1},
}
CLUSTER = ONE_EACH
NUM_ALONE = 40
NUM_TOKENS_ALONE = 4  # the hand-off, and a batch of one that goes on behind it
CONCURRENCY = 16

every_topology = pytest.mark.parametrize(
    "shared_ring", TOPOLOGIES.values(), ids=TOPOLOGIES.keys(), indirect=True
)


def ask(ring: Ring, case: Case, max_tokens: int, stream: bool, ignore_eos: bool) -> Body:
    options: Body = {**case.params, "max_tokens": max_tokens, "stream": stream}
    if ignore_eos:
        options["ignore_eos"] = True
    if case.messages:
        return ring.chat(case.messages[-1]["content"], **options)
    return ring.complete(case.prompt, **options)


@every_topology
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_named_prompts(ring: Ring, stream: bool) -> None:
    tries = [(case, ignore) for case in named_cases().values() for ignore in (False, True)]
    calls = [partial(ask, ring, c, len(c.token_ids), stream, ignore) for c, ignore in tries]
    wrong = []
    for (case, ignore), answer in zip(tries, ring.at_once(calls, 8), strict=True):
        got, max_tokens = ids_of(answer), len(case.token_ids)
        if compare(case, got, max_tokens, ignore_eos=ignore) is Verdict.WRONG:
            wrong.append((case.name, ignore, got, case.token_ids))
    assert not wrong


@every_topology
@pytest.mark.parametrize("max_tokens", [1, 2, 17])
def test_prompts_around_the_borders_of_blocks(ring: Ring, max_tokens: int) -> None:
    """vllm-project/vllm PR#50558: the first token opened a block that nobody had sent."""
    cases = [case for name, case in named_cases().items() if name.startswith("L")]
    assert len(cases) >= 8
    calls: list[Callable[[], Body]] = [
        partial(ask, ring, case, max_tokens, False, True) for case in cases
    ]
    answers = ring.at_once(calls)
    for case, answer in zip(cases, answers, strict=True):
        verdict = compare(case, ids_of(answer), max_tokens, ignore_eos=True)
        assert verdict is not Verdict.WRONG, case.name


@pytest.mark.parametrize("shared_ring", [TOPOLOGIES["1P1D"]], ids=["1P1D"], indirect=True)
@pytest.mark.timeout(600)
def test_two_hundred_varied_prompts(ring: Ring) -> None:
    """vllm-project/vllm #52617: everything reported success, and the tokens were wrong."""
    cases = prose_cases()
    assert len(cases) == 200
    for some, max_tokens, concurrency in (
        (cases, 16, CONCURRENCY),
        (cases[:NUM_ALONE], NUM_TOKENS_ALONE, 1),
    ):
        calls = [partial(ask, ring, case, max_tokens, False, True) for case in some]
        verdicts = [
            compare(case, ids_of(answer), max_tokens, ignore_eos=True)
            for case, answer in zip(some, ring.at_once(calls, concurrency), strict=True)
        ]
        wrong = [c.name for c, v in zip(some, verdicts, strict=True) if v is Verdict.WRONG]
        assert tolerable(verdicts), f"wrong: {wrong}, thin: {verdicts.count(Verdict.THIN)}"
