"""KV that is written slowly holds up nobody but its own request."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cluster.clients import ask, plain, prompt
from tests.cluster.faulty import FaultyRing

pytestmark = pytest.mark.breaking

# The stall timeout is the default one: the frames of a transfer that lie behind those of three
# others are late, and that is what is tried here.
FAULTY = {"prefill": 1, "decode": 1}
NUM_TOKENS = 600  # over 3 s, twice what all transfers take


def test_a_stream_goes_on_while_kv_is_written_slowly(ring: FaultyRing) -> None:
    """vllm-project/vllm #13816: receiving KV within the decode step stalled all streams."""
    ring.pace.write(write_s=0.02, decode_step_s=0.005)
    with ThreadPoolExecutor(4) as pool:
        stream = pool.submit(ask, ring.base_url, plain(0, max_tokens=NUM_TOKENS, stream=True))
        others = [
            pool.submit(ask, ring.base_url, plain(n, prompt=prompt(n, 400), max_tokens=2))
            for n in range(1, 4)
        ]
        assert [other.result(30).kind for other in others] == ["whole"] * 3
        is_running = not stream.done()
        outcome = stream.result(30)
    assert is_running, "the stream ended before the transfers: nothing was tried"
    assert len(outcome.token_ids) == NUM_TOKENS
    assert max(outcome.gaps_s[1:]) < 0.3  # but for the gap of its own hand-off
