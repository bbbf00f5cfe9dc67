"""Parts of a request's KV, without the package's wire messages, which need more to be installed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A Region."""

    layer_start: int
    layer_end: int
    token_start: int
    token_end: int
    head_start: int
    head_end: int
