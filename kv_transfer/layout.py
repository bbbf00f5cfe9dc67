"""How many bytes a region has, and whether it is inside a transfer."""

from __future__ import annotations

from splitserve.config import KVLayout
from splitserve.wire.messages import Region


def region_bytes(layout: KVLayout, region: Region) -> int:
    """The size of a region's buffer, [layers, 2, tokens, heads, head_bytes]."""
    return (
        (region.layer_end - region.layer_start)
        * 2
        * (region.token_end - region.token_start)
        * (region.head_end - region.head_start)
        * layout.head_bytes
    )


def region_fault(layout: KVLayout, region: Region, num_tokens: int) -> str | None:
    """Why a region is not a box inside the first `num_tokens` tokens of a request, or None."""
    axes = (
        ("layers", region.layer_start, region.layer_end, layout.num_layers),
        ("tokens", region.token_start, region.token_end, num_tokens),
        ("KV heads", region.head_start, region.head_end, layout.num_kv_heads),
    )
    for name, start, end, limit in axes:
        if not 0 <= start < end <= limit:
            return f"{name} [{start}, {end}) are not within [0, {limit})"
    return None
