"""Pools so small that everybody waits for somebody: all finish, and all are right.

A tiny model, since it is not what is said that matters here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tests.cluster.clients import prompt
from tests.cluster.harness import Body, Ring, ids_of, running
from tests.cluster.tiny_answers import greedy_all

FILLER_ID = 120


def ask(ring: Ring, token_ids: Sequence[int], max_tokens: int) -> Callable[[], Body]:
    return lambda: ring.complete(token_ids, max_tokens=max_tokens, ignore_eos=True)


def test_preempted_answers_stay_exact(tiny_model: Path) -> None:
    """vllm-project/vllm PR#53250: a preempted request must not wait for KV that came once."""
    prompts = [prompt(number, 14) for number in range(16)]
    with running(
        str(tiny_model), prefill=1, decode=1, decode_num_blocks=12, max_model_len=192
    ) as ring:
        answers = ring.at_once([ask(ring, one, 60) for one in prompts])
        assert [ids_of(answer) for answer in answers] == greedy_all(tiny_model, prompts, 60)
        ring.assert_drained()
        assert ring.total("decode", "num_preemptions") > 0


def test_prefill_pools_of_two_prompts_never_deadlock(tiny_model: Path) -> None:
    """LMCache/LMCache #1990: two sides each holding what the other waits for."""
    prompts = [prompt(number, 20) for number in range(64)]
    sizes = {"prefill_num_blocks": 4, "decode_num_blocks": 24, "max_model_len": 64}
    with running(str(tiny_model), prefill=2, decode=1, **sizes) as ring:
        answers = ring.at_once([ask(ring, one, 8) for one in prompts], concurrency=64)
        assert [ids_of(answer) for answer in answers] == greedy_all(tiny_model, prompts, 8)
        ring.assert_drained()
        assert all(w["num_tokens_prefilled"] > 0 for w in ring.workers("prefill"))


def test_a_decode_pool_smaller_than_a_burst_serves_all_of_it(tiny_model: Path) -> None:
    """sgl-project/sglang #6857: after one 'decode out of memory' everything hung."""
    prompts = [prompt(number, 30 + number % 71) for number in range(64)]
    right = greedy_all(tiny_model, prompts, 20)
    with running(
        str(tiny_model), prefill=1, decode=1, decode_num_blocks=24, max_model_len=192
    ) as ring:
        for _ in range(2):
            answers = ring.at_once([ask(ring, one, 20) for one in prompts], concurrency=32)
            assert [ids_of(answer) for answer in answers] == right
            ring.assert_drained()


def test_a_lone_answer_longer_than_the_pool_is_refused_at_once(tiny_model: Path) -> None:
    """vllm-project/vllm PR#52530: it preempted itself for ever."""
    with running(str(tiny_model), prefill=1, decode=1, num_blocks=64) as ring:
        body = {"prompt": [65] * 1000, "max_tokens": 100, "ignore_eos": True}
        response = ring.post("/v1/completions", body)
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert "1024" in message and "1100" in message
        filler = {str(FILLER_ID): 100}
        answer = ring.complete([65] * 1000, max_tokens=24, ignore_eos=True, logit_bias=filler)
        assert ids_of(answer) == [FILLER_ID] * 24
        assert answer["choices"][0]["finish_reason"] == "length"
        ring.assert_drained()
