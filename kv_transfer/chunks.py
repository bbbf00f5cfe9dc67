"""Cutting a request's KV into frames, and keeping count of which have arrived. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from kv_transfer.layout import region_bytes
from splitserve.config import KVLayout
from splitserve.wire.messages import Region

__all__ = ["MAX_FRAME_BYTES", "Coverage", "region_bytes", "split_regions"]

MAX_FRAME_BYTES = 4 << 20


def split_regions(
    layout: KVLayout, region: Region, max_frame_bytes: int = MAX_FRAME_BYTES
) -> Iterator[Region]:
    """Cut a region into frames of at most `max_frame_bytes`, of about equal sizes.

    Whole runs of layers go into one frame while they fit (few large frames travel twice as fast as
    many small ones); a layer that doesn't fit by itself is cut along its tokens. One token of one
    layer is never cut.
    """
    num_layers = region.layer_end - region.layer_start
    num_tokens = region.token_end - region.token_start
    if num_layers <= 0 or num_tokens <= 0:
        return
    layer_bytes = region_bytes(layout, replace(region, layer_end=region.layer_start + 1))
    tokens_per_piece = max(1, max_frame_bytes * num_tokens // layer_bytes)
    tokens = _even_cuts(region.token_start, region.token_end, -(-num_tokens // tokens_per_piece))
    layers_per_run = max(1, max_frame_bytes // layer_bytes)
    layers = _even_cuts(region.layer_start, region.layer_end, -(-num_layers // layers_per_run))
    for layer_start, layer_end in pairwise(layers):
        for token_start, token_end in pairwise(tokens):
            yield replace(
                region,
                layer_start=layer_start,
                layer_end=layer_end,
                token_start=token_start,
                token_end=token_end,
            )


def _even_cuts(start: int, end: int, num_pieces: int) -> list[int]:
    """Borders of `num_pieces` pieces of [start, end), sizes differing by one at most."""
    length = end - start
    return [start + length * i // num_pieces for i in range(num_pieces + 1)]


class Coverage:
    """Which boxes of a request's KV have arrived. Duplicates and overlaps are harmless."""

    def __init__(self) -> None:
        self._arrived: set[Region] = set()

    def add(self, region: Region) -> None:
        self._arrived.add(region)

    def missing(self, required: Region) -> tuple[Region, ...]:
        """The parts of `required` that have not arrived: disjoint boxes, empty when complete."""
        left = [required]
        for arrived in sorted(self._arrived, key=_bounds):  # a sweep keeps `left` short
            left = [piece for box in left for piece in _subtract(box, arrived)]
            if not left:
                return ()
        return tuple(sorted(left, key=_bounds))


Bounds = tuple[int, int, int, int, int, int]


def _bounds(region: Region) -> Bounds:
    return (
        region.layer_start,
        region.layer_end,
        region.token_start,
        region.token_end,
        region.head_start,
        region.head_end,
    )


def _subtract(box: Region, hole: Region) -> Iterator[Region]:
    """What is left of `box` without `hole`: slabs off both sides of each axis in turn."""
    bounds, cut = list(_bounds(box)), _bounds(hole)
    overlaps = [
        (max(bounds[low], cut[low]), min(bounds[low + 1], cut[low + 1])) for low in (0, 2, 4)
    ]
    if any(start >= end for start, end in overlaps):
        yield box
        return
    for low, (start, end) in zip((0, 2, 4), overlaps, strict=True):
        if bounds[low] < start:
            yield _with_axis(bounds, low, bounds[low], start)
        if end < bounds[low + 1]:
            yield _with_axis(bounds, low, end, bounds[low + 1])
        bounds[low : low + 2] = start, end


def _with_axis(bounds: list[int], low: int, start: int, end: int) -> Region:
    b = [*bounds[:low], start, end, *bounds[low + 2 :]]
    return Region(b[0], b[1], b[2], b[3], b[4], b[5])
