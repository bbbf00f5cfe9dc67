"""'No room now' and 'never room' are different answers (vllm-project/vllm #39734)."""

from __future__ import annotations

import pytest

from tests.cluster.harness import Ring, ids_of

one_small_pool = pytest.mark.parametrize(
    "shared_ring",
    [
        {"prefill": 1, "decode": 1, "prefill_num_blocks": 64},
        {"prefill": 1, "decode": 1, "decode_num_blocks": 64},
    ],
    ids=["prefill pool of 64 blocks", "decode pool of 64 blocks"],
    indirect=True,
)


@one_small_pool
def test_a_prompt_that_never_fits_is_refused_with_the_limit(ring: Ring) -> None:
    response = ring.post("/v1/completions", {"prompt": list(range(100, 1200)), "max_tokens": 4})
    assert response.status_code == 400
    assert "1100" in response.json()["error"]["message"]
    assert ids_of(ring.complete("The capital of France is", max_tokens=2)) == [7042, 30]


@one_small_pool
@pytest.mark.parametrize("num_tokens", [1007, 1008, 1009, 1023, 1025])
def test_at_the_border_it_is_served_or_refused_never_stuck(ring: Ring, num_tokens: int) -> None:
    response = ring.post("/v1/completions", {"prompt": [504] * num_tokens, "max_tokens": 1})
    assert response.status_code == (200 if num_tokens + 1 <= 1024 else 400)
    if num_tokens > 1024:
        message = response.json()["error"]["message"]
        assert "1024" in message or "1023" in message
