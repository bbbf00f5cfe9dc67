"""What one request must not do to others: stall them, starve them, or be computed twice."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import pytest

from tests.cluster.harness import Body, Ring, ids_of, stream
from tests.reference import Verdict, compare, named_cases

CLUSTER = {"prefill": 1, "decode": 1, "max_num_batched_tokens": 32, "dtype": "float32"}
FILLER: Body = {"28589": 100}


class Gaps(threading.Thread):
    """Reads one long stream and keeps the times at which tokens came."""

    def __init__(self, ring: Ring, num_tokens: int) -> None:
        super().__init__()
        self._ring = ring
        self._body: dict[str, Any] = {
            "prompt": "The capital of France is",
            "max_tokens": num_tokens,
            "temperature": 0,
            "logit_bias": FILLER,
            "stream": True,
            "return_token_ids": True,
        }
        self.times: list[float] = []
        self.ids: list[int] = []

    def run(self) -> None:
        for event in stream(self._ring.http, "/v1/completions", self._body):
            ids = event["choices"][0].get("token_ids") or []
            self.times += [time.monotonic()] * bool(ids)
            self.ids += ids

    @property
    def largest_s(self) -> float:
        return max(b - a for a, b in zip(self.times[1:], self.times[2:], strict=False))


def test_prompts_that_come_in_do_not_stop_a_running_stream(ring: Ring) -> None:
    """vllm-project/vllm #13816: receiving KV inside the decode step stalled every stream.

    The largest gap is held against half a second only, since other tests' machines may be busy;
    measured alone it is two or three steps.
    """
    gaps = Gaps(ring, 120)
    gaps.start()
    while len(gaps.times) < 5 and gaps.is_alive():
        gaps.join(0.01)
    prompts = [[300 + n] * 200 for n in range(5)]
    answers = ring.at_once([partial(ring.complete, prompt, max_tokens=2) for prompt in prompts])
    gaps.join(60)
    assert len(answers) == 5
    assert gaps.ids == [28589] * 120
    assert gaps.largest_s < 0.5


@pytest.mark.parametrize("at_once", [False, True], ids=["alone", "eight at once"])
def test_long_prompts_in_small_chunks_are_computed_once(ring: Ring, at_once: bool) -> None:
    """sgl-project/sglang-jax PR#1386: prompts longer than a chunk looped for ever."""
    cases = [named_cases()[name] for name in ("L33", "L48", "L64")]
    before = ring.total("prefill", "num_tokens_prefilled")
    prompts: list[Any] = [*(case.prompt for case in cases), [504] * 500]
    calls = [partial(ring.complete, prompt, max_tokens=4) for prompt in prompts]
    calls = calls * 2 if at_once else calls
    answers = ring.at_once(calls, concurrency=8 if at_once else 1)
    for case, answer in zip(cases, answers, strict=False):
        assert compare(case, ids_of(answer), 4) is not Verdict.WRONG
    ring.assert_drained()
    expected = sum(len(case.prompt_ids) for case in cases) + 500
    computed = ring.total("prefill", "num_tokens_prefilled") - before
    assert computed == expected * (2 if at_once else 1)


def test_a_request_that_breaks_arithmetic_harms_nobody(ring: Ring) -> None:
    """sgl-project/sglang #40076: one request's parameters killed the scheduler for all."""
    gaps = Gaps(ring, 60)
    gaps.start()
    while len(gaps.times) < 3 and gaps.is_alive():
        gaps.join(0.01)
    for penalty in (1e-300, 1e-2, 100):
        body = {"prompt": "a", "repetition_penalty": penalty, "max_tokens": 3, "logprobs": 2}
        assert ring.post("/v1/completions", body).status_code in (200, 400)
    gaps.join(60)
    assert gaps.ids == [28589] * 60
