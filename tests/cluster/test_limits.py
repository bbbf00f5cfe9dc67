"""'No room now' and 'never room' are different answers (vllm-project/vllm #39734)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.clients import prompt
from tests.cluster.harness import Ring, ids_of
from tests.cluster.tiny_answers import greedy

TINY = {"prefill": 1, "decode": 1}
one_small_pool = pytest.mark.parametrize(
    "shared_ring",
    [{**TINY, "prefill_num_blocks": 64}, {**TINY, "decode_num_blocks": 64}],
    ids=["prefill pool of 64 blocks", "decode pool of 64 blocks"],
    indirect=True,
)


@one_small_pool
def test_a_prompt_that_never_fits_is_refused_with_the_limit(ring: Ring, tiny_model: Path) -> None:
    response = ring.post("/v1/completions", {"prompt": prompt(1, 1100), "max_tokens": 4})
    assert response.status_code == 400
    assert "1100" in response.json()["error"]["message"]
    answer = ring.complete(prompt(2), max_tokens=2, ignore_eos=True)
    assert ids_of(answer) == greedy(tiny_model, prompt(2), 2)


@one_small_pool
@pytest.mark.parametrize("num_tokens", [1007, 1008, 1009, 1023, 1025])
def test_at_the_border_it_is_served_or_refused_never_stuck(ring: Ring, num_tokens: int) -> None:
    response = ring.post("/v1/completions", {"prompt": [65] * num_tokens, "max_tokens": 1})
    assert response.status_code == (200 if num_tokens + 1 <= 1024 else 400)
    if num_tokens > 1024:
        message = response.json()["error"]["message"]
        assert "1024" in message or "1023" in message
