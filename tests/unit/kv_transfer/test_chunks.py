from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.chunks import Coverage, split_regions
from kv_transfer.layout import region_bytes
from splitserve.config import KVLayout
from splitserve.wire.messages import Region
from tests.fake_store import LAYOUT, random_region, whole

SMOL = KVLayout("bfloat16", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16)


def boxes(max_end: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, max_end), st.integers(0, max_end)).map(
        lambda pair: (min(pair), max(pair) + 1)
    )


def cells(region: Region) -> set[tuple[int, int, int]]:
    return {
        (layer, token, head)
        for layer in range(region.layer_start, region.layer_end)
        for token in range(region.token_start, region.token_end)
        for head in range(region.head_start, region.head_end)
    }


@given(
    layers=boxes(29),
    tokens=boxes(300),
    heads=boxes(2),
    max_frame_bytes=st.integers(1, 500_000),
)
def test_frames_tile_the_region_within_the_limit(
    layers: tuple[int, int], tokens: tuple[int, int], heads: tuple[int, int], max_frame_bytes: int
) -> None:
    region = Region(*layers, *tokens, *heads)
    frames = list(split_regions(SMOL, region, max_frame_bytes))
    least = region_bytes(SMOL, Region(0, 1, 0, 1, *heads))
    assert all(region_bytes(SMOL, f) <= max(max_frame_bytes, least) for f in frames)
    assert sum(region_bytes(SMOL, f) for f in frames) == region_bytes(SMOL, region)
    coverage = Coverage()
    for frame in frames:
        coverage.add(frame)
    assert coverage.missing(region) == ()  # with the sum above: no overlap and no gap


def test_layers_are_packed_into_runs() -> None:
    """256 tokens of a 30-layer model are 5.9 MB: two frames of 15 layers, not 30 of one."""
    frames = list(split_regions(SMOL, whole(SMOL, 256)))
    assert [(f.layer_start, f.layer_end) for f in frames] == [(0, 15), (15, 30)]
    assert all((f.token_start, f.token_end) == (0, 256) for f in frames)


def test_a_long_chunk_is_cut_along_tokens() -> None:
    one_layer = region_bytes(SMOL, Region(0, 1, 0, 100, 0, 3))
    frames = list(split_regions(SMOL, whole(SMOL, 100), one_layer - 1))
    assert {(f.token_start, f.token_end) for f in frames} == {(0, 50), (50, 100)}
    assert len(frames) == 60


@pytest.mark.parametrize("region", [Region(0, 5, 7, 7, 0, 3), Region(2, 2, 0, 7, 0, 3)])
def test_an_empty_region_makes_no_frames(region: Region) -> None:
    assert list(split_regions(LAYOUT, region)) == []


@pytest.mark.parametrize("seed", range(20))
def test_missing_is_exactly_what_did_not_arrive(seed: int) -> None:
    rng = random.Random(seed)
    required = whole(LAYOUT, 30)
    coverage = Coverage()
    left = cells(required)
    for _ in range(rng.randint(0, 12)):
        region = random_region(rng, 40)
        for _ in range(rng.randint(1, 2)):
            coverage.add(region)
        left -= cells(region)
    missing = coverage.missing(required)
    assert sum(len(cells(r)) for r in missing) == len(left)
    assert {cell for r in missing for cell in cells(r)} == left


def test_one_lost_frame_is_named_as_it_was_sent() -> None:
    frames = list(split_regions(SMOL, whole(SMOL, 1000), 1 << 20))
    lost = frames[len(frames) // 2]
    coverage = Coverage()
    for frame in frames:
        if frame != lost:
            coverage.add(frame)
    assert coverage.missing(whole(SMOL, 1000)) == (lost,)


def test_many_frames_are_looked_through_quickly() -> None:
    """A 100,000-token prompt in chunks of 512: counted in subtractions, not in seconds."""
    chunks = [
        replace(whole(SMOL, 100_000), token_start=start, token_end=min(start + 512, 100_000))
        for start in range(0, 100_000, 512)
    ]
    frames = [frame for chunk in chunks for frame in split_regions(SMOL, chunk)]
    random.Random(1).shuffle(frames)
    coverage = Coverage()
    for frame in frames:
        coverage.add(frame)
    assert len(frames) > 500
    assert coverage.missing(whole(SMOL, 100_000)) == ()
    assert coverage.missing(whole(SMOL, 100_001))[0].token_start == 100_000


def test_the_size_of_a_region_is_that_of_its_array() -> None:
    region = Region(3, 9, 10, 27, 1, 3)
    array = np.zeros((6, 2, 17, 2, 64), np.uint16)
    assert region_bytes(SMOL, region) == array.nbytes
    assert region_bytes(replace(SMOL, dtype="float32"), region) == 2 * array.nbytes
