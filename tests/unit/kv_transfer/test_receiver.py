from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import xxhash

from kv_transfer.base import FrameDropped, FrameWritten, TransferKey
from kv_transfer.receiver import StoreReceiver
from splitserve.config import KVLayout
from splitserve.wire.messages import FrameHeader, Region
from tests.fake_store import LAYOUT, FakeStore, whole

KEY = TransferKey("request", 0)
OTHER = TransferKey("other", 3)


def frame(key: TransferKey = KEY, num_tokens: int = 16) -> tuple[FrameHeader, memoryview]:
    region = whole(LAYOUT, num_tokens)
    store = FakeStore()
    store.fill(1)
    data = store.read([0], region)
    checksum = xxhash.xxh3_64_intdigest(data)
    return FrameHeader(key.request_id, key.attempt, "epoch", region, checksum), data


class HookedStore(FakeStore):
    """Calls a hook when its layout is asked for, which is before a write."""

    hook: Callable[[], None] = staticmethod(lambda: None)

    @property
    def layout(self) -> KVLayout:
        self.hook()
        return super().layout


def test_a_grant_taken_back_while_the_frame_is_verified_is_not_written_to() -> None:
    store = HookedStore()
    receiver = StoreReceiver(store)
    receiver.grant(KEY, [5], 16)
    store.hook = lambda: receiver.revoke(KEY)
    outcome = receiver.accept(*frame())
    assert outcome == FrameDropped(KEY, "the grant was taken back")
    assert not store.blocks.any()


def test_nor_is_the_next_grant_of_the_same_key() -> None:
    store = HookedStore()
    receiver = StoreReceiver(store)
    receiver.grant(KEY, [5], 16)

    def regrant() -> None:
        store.hook = lambda: None
        receiver.revoke(KEY)
        receiver.grant(KEY, [6], 16)

    store.hook = regrant
    assert isinstance(receiver.accept(*frame()), FrameDropped)
    assert not store.blocks.any()
    assert isinstance(receiver.accept(*frame()), FrameWritten)
    assert store.blocks[6].all() and not store.blocks[5].any()


class StuckStore(FakeStore):
    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def write(self, block_ids: Sequence[int], region: Region, data: memoryview) -> None:
        self.entered.set()
        assert self.go_on.wait(10)
        super().write(block_ids, region, data)


def test_revoking_another_transfer_does_not_wait() -> None:
    store = StuckStore()
    receiver = StoreReceiver(store)
    receiver.grant(KEY, [5], 16)
    receiver.grant(OTHER, [6], 16)
    writing = threading.Thread(target=receiver.accept, args=frame())
    writing.start()
    try:
        assert store.entered.wait(10)
        other = threading.Thread(target=receiver.revoke, args=(OTHER,))
        other.start()
        other.join(5)
        assert not other.is_alive()
    finally:
        store.go_on.set()
        writing.join(10)
    assert isinstance(receiver.accept(*frame(OTHER)), FrameDropped)


def test_a_write_that_raises_leaves_nothing_in_flight() -> None:
    class BrokenStore(FakeStore):
        def write(self, block_ids: Sequence[int], region: Region, data: memoryview) -> None:
            raise RuntimeError("a bug")

    receiver = StoreReceiver(BrokenStore())
    receiver.grant(KEY, [5], 16)
    with pytest.raises(RuntimeError):
        receiver.accept(*frame())
    revoking = threading.Thread(target=receiver.revoke, args=(KEY,), daemon=True)
    revoking.start()
    revoking.join(5)
    assert not revoking.is_alive()


def test_revoking_what_was_never_granted_is_fine() -> None:
    receiver = StoreReceiver(FakeStore())
    receiver.revoke(KEY)
    assert isinstance(receiver.accept(*frame()), FrameDropped)


def test_tokens_that_were_there_before_are_never_written() -> None:
    """Their blocks are read by others, whatever a peer sends."""
    store = FakeStore()
    receiver = StoreReceiver(store)
    receiver.grant(KEY, [5], 16, first_token=8)
    dropped = receiver.accept(*frame())
    assert isinstance(dropped, FrameDropped) and "those before 8 are not to be" in dropped.reason
    assert not store.blocks.any()
