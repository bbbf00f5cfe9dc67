"""What is cached is neither computed nor sent again, and changes no answer.

A tiny model, and counters of the workers: which tokens were computed, and which bytes were sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.clients import prompt
from tests.cluster.harness import Body, Ring, ids_of, running
from tests.cluster.tiny_answers import greedy_all
from tests.waiting import wait_until

BLOCK = 16
NUM_TOKENS = 6
LENGTHS = (15, 16, 17, 31, 32, 33, 48, 64)
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "1P1D": {"prefill": 1, "decode": 1},
    "2P2D": {"prefill": 2, "decode": 2, "num_threads": 1},
    "aggregated": {"prefill": 0, "decode": 1},
}


@pytest.fixture(scope="module", params=TOPOLOGIES.values(), ids=list(TOPOLOGIES))
def caching(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[Ring]:
    with running(str(tiny_model), **request.param, enable_prefix_caching=True) as ring:
        yield ring


@pytest.fixture
def pair(tiny_model: Path) -> Iterator[Ring]:
    """1P1D, nothing cached yet."""
    with running(str(tiny_model), **TOPOLOGIES["1P1D"], enable_prefix_caching=True) as ring:
        yield ring


def ask(ring: Ring, token_ids: Sequence[int], num_tokens: int = NUM_TOKENS) -> Callable[[], Body]:
    return lambda: ring.complete(token_ids, max_tokens=num_tokens, ignore_eos=True)


def answers(ring: Ring, prompts: Sequence[Sequence[int]], concurrency: int = 1) -> list[list[int]]:
    got = ring.at_once([ask(ring, one) for one in prompts], concurrency)
    return [ids_of(answer) for answer in got]


def cached_of(answer: Body) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def nothing_cached(ring: Ring, role: str) -> bool:
    return ring.total(role, "num_blocks_cached") == 0


def moved(ring: Ring, num_computed: int) -> int:
    """Bytes that were sent, once so many tokens are computed and all is over."""
    name = "num_tokens_prefilled"
    wait_until(lambda: ring.total("prefill", name) == num_computed, 10, f"{num_computed} computed")
    ring.assert_drained()
    sent = ring.total("prefill", "num_kv_bytes_sent")
    received = "num_kv_bytes_received"  # comes with another worker's heartbeat
    wait_until(lambda: ring.total("decode", received) == sent, 10, f"{sent} bytes received")
    return sent


def test_a_prompt_said_again_has_the_same_answer(caching: Ring, tiny_model: Path) -> None:
    """lablup/mlxcel#1760, GeeeekExplorer/nano-vllm#144: a prompt that is cached to its end."""
    prompts = [prompt(number, length) for number, length in enumerate(LENGTHS)]
    right = greedy_all(tiny_model, prompts, NUM_TOKENS)
    for _ in range(3):
        assert answers(caching, prompts) == right
    cold = prompt(100, 40)
    mixed = [*prompts[:4], cold, *prompts[4:]]
    [new] = greedy_all(tiny_model, [cold], NUM_TOKENS)
    assert answers(caching, mixed, len(mixed)) == [*right[:4], new, *right[4:]]
    caching.assert_drained()


def test_other_tails_of_a_prefix_are_right(caching: Ring, tiny_model: Path) -> None:
    """ROCm/ATOM PR#1551, tenstorrent/vllm#415: behind a hit only the new tokens were seen."""
    prefix = prompt(200, 4 * BLOCK)
    prompts = [[*prefix, *prompt(201 + tail, 3 + tail)] for tail in range(8)]
    right = greedy_all(tiny_model, prompts, NUM_TOKENS)
    assert answers(caching, prompts, len(prompts)) == right
    assert answers(caching, prompts, len(prompts)) == right
    caching.assert_drained()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_usage_tells_the_cached_tokens(caching: Ring, stream: bool) -> None:
    """sgl-project/sglang#10513, lablup/mlxcel#398: always 0 where prefill is apart."""
    token_ids = prompt(300 + stream, 31)
    options: Body = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": stream}
    if stream:
        options["stream_options"] = {"include_usage": True}
    first, second = (caching.complete(token_ids, **options) for _ in range(2))
    assert [one["usage"]["prompt_tokens"] for one in (first, second)] == [31, 31]
    assert cached_of(first) == 0
    if len(caching.workers("prefill")) <= 1:  # else another worker may compute it
        assert cached_of(second) == BLOCK


def test_a_shared_prefix_is_computed_once_and_sent_once(pair: Ring, tiny_model: Path) -> None:
    """All come at once: those behind the first wait until it is there."""
    answers(pair, [prompt(400, BLOCK)])
    token_bytes = moved(pair, BLOCK) // BLOCK
    prefix = prompt(401, 4 * BLOCK)
    prompts = [[*prefix, *prompt(402 + tail, 8)] for tail in range(8)]
    assert answers(pair, prompts, len(prompts)) == greedy_all(tiny_model, prompts, NUM_TOKENS)
    num_computed = BLOCK + len(prefix) + 8 * len(prompts)
    assert moved(pair, num_computed) == num_computed * token_bytes


def test_a_prompt_that_is_there_is_not_sent(pair: Ring) -> None:
    """vllm-project/vllm PR#18632, #25267: the prefill side held such a prompt until a timeout."""
    token_ids = prompt(500, 4 * BLOCK)
    answers(pair, [token_ids])
    sent = moved(pair, 4 * BLOCK)
    for number in (5, 6):  # the last block again, for its first token
        answers(pair, [token_ids])
        assert moved(pair, number * BLOCK) == sent
    answers(pair, [[*token_ids[: 2 * BLOCK], *prompt(501, 10)]])
    assert moved(pair, 6 * BLOCK + 10) == sent + 10 * sent // (4 * BLOCK)


def test_a_reset_forgets_everything(pair: Ring) -> None:
    token_ids = prompt(600, 3 * BLOCK)
    for expected in (0, 2 * BLOCK):
        answer = pair.complete(token_ids, max_tokens=NUM_TOKENS, ignore_eos=True)
        assert cached_of(answer) == expected
    response = pair.http.post("/reset_prefix_cache")
    assert response.status_code == 200 and len(response.json()["worker_ids"]) == 2
    for role in ("prefill", "decode"):
        is_empty = functools.partial(nothing_cached, pair, role)
        wait_until(is_empty, 10, f"nothing cached on {role}")
    assert cached_of(pair.complete(token_ids, max_tokens=NUM_TOKENS, ignore_eos=True)) == 0


def test_recomputed_tokens_are_no_hits(tiny_model: Path) -> None:
    """vllm-project/vllm#25780: after preemption a third of random prompts counted as cached."""
    prompts = [prompt(700 + number, 20) for number in range(16)]
    flags = {**TOPOLOGIES["1P1D"], "decode_num_blocks": 12, "max_model_len": 192}
    with running(str(tiny_model), **flags, enable_prefix_caching=True) as ring:
        got = ring.at_once([ask(ring, one, 60) for one in prompts])
        assert [ids_of(one) for one in got] == greedy_all(tiny_model, prompts, 60)
        ring.assert_drained()
        assert ring.total("decode", "num_preemptions") > 0
        assert [cached_of(one) for one in got] == [0] * len(prompts)
        assert ring.total("prefill", "num_prefix_hits") == 0
        assert ring.total("decode", "num_prefix_hits") == 0


def test_answers_are_right_in_a_storm_of_evictions(tiny_model: Path) -> None:
    """Pools that hold a few prompts, and prompts that share beginnings of every length."""
    base = prompt(800, 6 * BLOCK)
    prompts = [
        [*base[: 8 * (number % 12)], *prompt(801 + number, 20 + number % 9)] for number in range(48)
    ]
    right = greedy_all(tiny_model, prompts, NUM_TOKENS)
    flags = {"prefill_num_blocks": 14, "decode_num_blocks": 20, "max_model_len": 160}
    topology = TOPOLOGIES["1P1D"]
    with running(str(tiny_model), **topology, **flags, enable_prefix_caching=True) as ring:
        for _ in range(2):
            assert answers(ring, prompts, 16) == right
            ring.assert_drained()
        assert ring.total("prefill", "num_prefix_hits") > 0
