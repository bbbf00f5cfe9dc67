"""Pools so small that everybody waits for somebody: all finish, and all are right."""

from __future__ import annotations

from collections.abc import Callable

from tests.cluster.harness import Body, Ring, ids_of, running

COUNTING = "1 2 3 4 5 6 7"
COUNTING_IDS = [216, 40, 216, 41, 216, 33, 32, 216, 33, 33, 216, 33, 34, 216, 33, 35, 216, 33, 36]
FILLER = {"28589": 100}


def counting(ring: Ring, max_tokens: int) -> Callable[[], Body]:
    return lambda: ring.complete(COUNTING, max_tokens=max_tokens)


def test_preempted_answers_stay_exact() -> None:
    """vllm-project/vllm PR#53250: a preempted request must not wait for KV that came once."""
    with running(prefill=1, decode=1, decode_num_blocks=12, max_model_len=192) as ring:
        alone = ids_of(ring.complete(COUNTING, max_tokens=60))
        assert alone[: len(COUNTING_IDS)] == COUNTING_IDS
        answers = ring.at_once([counting(ring, 60) for _ in range(16)])
        assert [ids_of(answer) for answer in answers] == [alone] * 16
        ring.assert_drained()
        assert ring.total("decode", "num_preemptions") > 0


def test_prefill_pools_of_two_prompts_never_deadlock() -> None:
    """LMCache/LMCache #1990: two sides each holding what the other waits for."""
    prompt = "one two three four five six seven eight nine ten " * 2
    with running(
        prefill=2, decode=1, prefill_num_blocks=4, decode_num_blocks=24, max_model_len=64
    ) as ring:
        alone = ids_of(ring.complete(prompt, max_tokens=8))
        answers = ring.at_once(
            [lambda: ring.complete(prompt, max_tokens=8) for _ in range(64)], concurrency=64
        )
        assert [ids_of(answer) for answer in answers] == [alone] * 64
        ring.assert_drained()
        assert all(w["num_tokens_prefilled"] > 0 for w in ring.workers("prefill"))


def test_a_decode_pool_smaller_than_a_burst_serves_all_of_it() -> None:
    """sgl-project/sglang #6857: after one 'decode out of memory' everything hung."""
    with running(prefill=1, decode=1, decode_num_blocks=24, max_model_len=192) as ring:
        prompts = [[(7 * n + k) % 40_000 + 100 for k in range(30 + n % 71)] for n in range(64)]

        def ask(prompt: list[int]) -> Callable[[], Body]:
            return lambda: ring.complete(prompt, max_tokens=20, ignore_eos=True)

        for _ in range(2):
            answers = ring.at_once([ask(prompt) for prompt in prompts], concurrency=32)
            assert [len(ids_of(answer)) for answer in answers] == [20] * 64
            ring.assert_drained()


def test_a_lone_answer_longer_than_the_pool_is_refused_at_once() -> None:
    """vllm-project/vllm PR#52530: it preempted itself for ever."""
    with running(prefill=1, decode=1, num_blocks=64) as ring:
        body = {"prompt": [504] * 1000, "max_tokens": 100, "ignore_eos": True}
        response = ring.post("/v1/completions", body)
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert "1024" in message and "1100" in message
        answer = ring.complete([504] * 1000, max_tokens=24, ignore_eos=True, logit_bias=FILLER)
        assert ids_of(answer) == [28589] * 24
        assert answer["choices"][0]["finish_reason"] == "length"
        ring.assert_drained()
