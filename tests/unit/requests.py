"""Makes requests for tests of pure state machines."""

from __future__ import annotations

from splitserve.config import KVLayout
from splitserve.request import Sampling
from splitserve.scheduling.sequence import Request, RequestKey
from splitserve.wire.messages import Choice

LAYOUT = KVLayout("float32", num_layers=3, num_kv_heads=2, head_dim=4, block_size=4)


def make_request(
    name: str, num_tokens: int, max_tokens: int = 8, n: int = 1, deadline: float = 600.0
) -> Request:
    """A prompt of `num_tokens` tokens with `n` choices; its token ids count up from 0."""
    return Request(
        RequestKey(name, 0),
        "epoch",
        tuple(range(num_tokens)),
        num_tokens,
        tuple(Choice(i, 7) for i in range(n)),
        Sampling(max_tokens=max_tokens),
        deadline,
        10.0,
    )
