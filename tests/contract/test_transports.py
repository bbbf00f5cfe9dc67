"""What every transport promises: one body of tests, run over each."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from kv_transfer.base import FrameDropped, FrameWritten, TransferKey
from kv_transfer.chunks import Coverage, split_regions
from kv_transfer.layout import region_bytes
from splitserve.wire.messages import FrameHeader, Region
from tests.contract.rigs import TRANSPORTS, Rig, make_rig
from tests.fake_store import LAYOUT, FakeStore, blocks_for, random_region, whole

KEY = TransferKey("request", 0)
NUM_TOKENS = 100


@pytest.fixture(params=TRANSPORTS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = make_rig(request.param)
    yield rig
    rig.close()


def header(region: Region, key: TransferKey = KEY, checksum: int = 0) -> FrameHeader:
    return FrameHeader(key.request_id, key.attempt, "epoch", region, checksum)


def true_frame(rig: Rig, blocks: Sequence[int], region: Region) -> tuple[FrameHeader, bytes]:
    data = bytes(rig.prefill.read(blocks, region))
    return header(region, checksum=xxhash.xxh3_64_intdigest(data)), data


def test_regions_arrive_bit_equal_in_other_blocks(rig: Rig) -> None:
    rng = random.Random(5)
    for attempt in range(40):
        key = TransferKey("request", attempt)
        num_tokens = rng.randint(1, 200)
        theirs, ours = blocks_for(num_tokens, rng), blocks_for(num_tokens, rng)
        region = random_region(rng, num_tokens)
        rig.decode.blocks[:] = 0
        rig.receiver.grant(key, ours, num_tokens)
        assert rig.sender.send(rig.peer, header(region, key), theirs) == region_bytes(
            LAYOUT, region
        )
        (outcome,) = rig.outcomes(1)
        assert outcome == FrameWritten(key, region, region_bytes(LAYOUT, region))
        sent = rig.prefill.tokens(theirs, region)
        assert np.array_equal(rig.decode.tokens(ours, region), sent)
        assert np.count_nonzero(rig.decode.blocks) == sent.size  # and nothing else was written
        rig.receiver.revoke(key)


@pytest.mark.parametrize("chunk", [17, 24, 31, 64])
@pytest.mark.parametrize("max_frame_bytes", [700, 10_000])
def test_chunks_add_up_to_the_prompt(rig: Rig, chunk: int, max_frame_bytes: int) -> None:
    rng = random.Random(chunk)
    theirs, ours = blocks_for(NUM_TOKENS, rng), blocks_for(NUM_TOKENS, rng)
    rig.receiver.grant(KEY, ours, NUM_TOKENS)
    num_sent = 0
    for start in range(0, NUM_TOKENS, chunk):
        end = min(start + chunk, NUM_TOKENS)
        rows = replace(whole(LAYOUT, NUM_TOKENS), token_start=start, token_end=end)
        for region in split_regions(LAYOUT, rows, max_frame_bytes):
            rig.sender.send(rig.peer, header(region), theirs)
            num_sent += 1
    coverage = Coverage()
    for outcome in rig.outcomes(num_sent):
        assert isinstance(outcome, FrameWritten)
        coverage.add(outcome.region)
    box = whole(LAYOUT, NUM_TOKENS)
    assert coverage.missing(box) == ()
    assert np.array_equal(rig.decode.tokens(ours, box), rig.prefill.tokens(theirs, box))


def test_frames_of_another_attempt_are_dropped_and_counted(rig: Rig) -> None:
    rng = random.Random(1)
    blocks = blocks_for(NUM_TOKENS, rng)
    rig.receiver.grant(KEY, blocks, NUM_TOKENS)
    for key in (TransferKey("request", 1), TransferKey("other", 0)):
        rig.sender.send(rig.peer, header(whole(LAYOUT, 20), key), blocks)
        (outcome,) = rig.outcomes(1)
        assert isinstance(outcome, FrameDropped) and outcome.key == key
    assert rig.receiver.num_frames_dropped == 2
    assert not rig.decode.blocks.any()


def test_a_new_grant_does_not_let_the_old_attempt_in(rig: Rig) -> None:
    """sgl-project/sglang#35360: blocks given to the next request, hit by a late write."""
    blocks = blocks_for(NUM_TOKENS, random.Random(1))
    rig.receiver.grant(KEY, blocks, NUM_TOKENS)
    rig.receiver.revoke(KEY)
    rig.receiver.grant(TransferKey("request", 1), blocks, NUM_TOKENS)
    rig.sender.send(rig.peer, header(whole(LAYOUT, 20)), blocks)
    assert isinstance(rig.outcomes(1)[0], FrameDropped)
    assert not rig.decode.blocks.any()


def _wrong_frames(rig: Rig, blocks: Sequence[int]) -> dict[str, tuple[FrameHeader, bytes]]:
    box = whole(LAYOUT, 40)
    good, data = true_frame(rig, blocks, box)
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 4
    wrong_regions = {
        "past the grant": replace(box, token_end=NUM_TOKENS + 1),
        "beyond the layers": replace(box, layer_end=LAYOUT.num_layers + 1),
        "beyond the heads": replace(box, head_end=LAYOUT.num_kv_heads + 1),
        "empty": replace(box, token_start=40),
        "backwards": replace(box, token_start=50),
        "other tokens": replace(box, token_start=1),
        "huge": replace(box, token_end=2**62),
    }
    return {
        "truncated": (good, data[:-2]),
        "empty buffer": (good, b""),
        "too long": (good, data + b"\0\0"),
        "flipped bit": (good, bytes(flipped)),
        "wrong checksum": (replace(good, checksum=good.checksum ^ 1), data),
        **{name: (replace(good, region=region), data) for name, region in wrong_regions.items()},
    }


def test_wrong_frames_are_dropped_with_a_reason(rig: Rig) -> None:
    blocks = blocks_for(NUM_TOKENS, random.Random(2))
    rig.receiver.grant(KEY, blocks, NUM_TOKENS)
    frames = _wrong_frames(rig, blocks)
    for name, (head, data) in frames.items():
        rig.inject(head, data)
        (outcome,) = rig.outcomes(1)
        assert isinstance(outcome, FrameDropped) and outcome.reason, name
        assert not rig.decode.blocks.any(), name
    assert rig.receiver.num_frames_dropped == len(frames)
    rig.inject(*true_frame(rig, blocks, whole(LAYOUT, 40)))  # and a right one is still taken
    assert isinstance(rig.outcomes(1)[0], FrameWritten)


def test_a_duplicate_frame_changes_nothing(rig: Rig) -> None:
    blocks = blocks_for(NUM_TOKENS, random.Random(3))
    rig.receiver.grant(KEY, blocks, NUM_TOKENS)
    box = whole(LAYOUT, NUM_TOKENS)
    for _ in range(2):
        rig.sender.send(rig.peer, header(box), blocks)
    coverage = Coverage()
    for outcome in rig.outcomes(2):
        assert isinstance(outcome, FrameWritten)
        coverage.add(outcome.region)
    assert coverage.missing(box) == ()
    assert np.array_equal(rig.decode.tokens(blocks, box), rig.prefill.tokens(blocks, box))


def test_sixteen_transfers_at_once_keep_apart(rig: Rig) -> None:
    rng = random.Random(4)
    order = rng.sample(range(64), 64)
    keys = [TransferKey(f"request-{i}", i) for i in range(16)]
    ours = {key: order[4 * i : 4 * i + 4] for i, key in enumerate(keys)}
    theirs = {key: rng.sample(range(64), 4) for key in keys}
    frames = []
    for key in keys:
        rig.receiver.grant(key, ours[key], 64)
        frames += [(key, r) for r in split_regions(LAYOUT, whole(LAYOUT, 64), 5_000)]
    rng.shuffle(frames)
    for key, region in frames:
        rig.sender.send(rig.peer, header(region, key), theirs[key])
    assert all(isinstance(o, FrameWritten) for o in rig.outcomes(len(frames)))
    for key in keys:
        box = whole(LAYOUT, 64)
        assert np.array_equal(
            rig.decode.tokens(ours[key], box), rig.prefill.tokens(theirs[key], box)
        )


class SlowStore(FakeStore):
    """Holds its first write until told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.num_writes = 0

    def write(self, block_ids: Sequence[int], region: Region, data: memoryview) -> None:
        self.entered.set()
        assert self.go_on.wait(10)
        super().write(block_ids, region, data)
        self.num_writes += 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_revoke_waits_for_the_write_in_flight_and_stops_the_rest(transport: str) -> None:
    """An abort half-way: when revoke returns, the blocks may be given to someone else."""
    store = SlowStore()
    rig = make_rig(transport, store)
    blocks = blocks_for(NUM_TOKENS, random.Random(6))
    rig.receiver.grant(KEY, blocks, NUM_TOKENS)
    regions = list(split_regions(LAYOUT, whole(LAYOUT, NUM_TOKENS), 5_000))
    sending = threading.Thread(
        target=lambda: [rig.sender.send(rig.peer, header(r), blocks) for r in regions]
    )
    sending.start()
    assert store.entered.wait(10)
    revoking = threading.Thread(target=rig.receiver.revoke, args=(KEY,))
    revoking.start()
    revoking.join(0.1)
    assert revoking.is_alive(), "revoke returned while a write was in flight"
    assert store.num_writes == 0
    store.go_on.set()
    revoking.join(10)
    assert not revoking.is_alive()
    at_revoke, num_writes = store.blocks.copy(), store.num_writes
    sending.join(10)
    outcomes = rig.outcomes(len(regions))
    assert sum(isinstance(o, FrameWritten) for o in outcomes) == num_writes < len(regions)
    assert np.array_equal(store.blocks, at_revoke), "something was written after revoke"
    rig.close()
