"""Taking frames in, the same for every transport that delivers a header and a buffer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kv_transfer.base import FrameDropped, FrameWritten, KVReceiver, KVStore, TransferKey
from kv_transfer.layout import region_bytes, region_fault
from splitserve.wire.messages import FrameHeader

MAX_WRITE_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class _Grant:
    block_ids: tuple[int, ...]
    num_tokens: int
    first_token: int


class StoreReceiver(KVReceiver):
    """Owns the grants of one decode worker, and writes their frames into its store."""

    def __init__(self, store: KVStore) -> None:
        self.num_frames_dropped = 0
        self._store = store
        self._grants: dict[TransferKey, _Grant] = {}
        self._writing: list[_Grant] = []  # a grant taken back may still be here for one write
        self._changed = threading.Condition()

    def grant(
        self, key: TransferKey, block_ids: Sequence[int], num_tokens: int, first_token: int = 0
    ) -> None:
        block_size = self._store.layout.block_size
        assert num_tokens <= len(block_ids) * block_size, "a grant of more tokens than blocks hold"
        with self._changed:
            self._grants[key] = _Grant(tuple(block_ids), num_tokens, first_token)

    def revoke(self, key: TransferKey) -> None:
        """Waits for a write of this transfer only: one copy in memory, which always ends."""
        with self._changed:
            grant = self._grants.pop(key, None)
            ended = self._changed.wait_for(lambda: grant not in self._writing, MAX_WRITE_S)
        if not ended:
            raise RuntimeError(f"a write of {key} lasted over {MAX_WRITE_S:g} s")

    def accept(self, header: FrameHeader, data: memoryview) -> FrameWritten | FrameDropped:
        key = TransferKey(header.request_id, header.attempt)
        grant = self._grants.get(key)
        fault = self._fault(grant, header, data) or self._write(key, grant, header, data)
        if fault is None:
            return FrameWritten(key, header.region, data.nbytes)
        self.num_frames_dropped += 1
        return FrameDropped(key, fault)

    def _fault(self, grant: _Grant | None, header: FrameHeader, data: memoryview) -> str | None:
        """What is wrong with a frame, cheapest look first."""
        if grant is None:
            return "nothing is granted to this attempt"
        layout = self._store.layout
        fault = region_fault(layout, header.region, grant.num_tokens)
        if fault is not None:
            return fault
        if header.region.token_start < grant.first_token:
            start, first = header.region.token_start, grant.first_token
            return f"tokens from {start} on, those before {first} are not to be written"
        expected = region_bytes(layout, header.region)
        if data.nbytes != expected:
            return f"{data.nbytes} bytes for a region of {expected}"
        if xxhash.xxh3_64_intdigest(data) != header.checksum:
            return "the checksum does not match"
        return None

    def _write(
        self, key: TransferKey, grant: _Grant | None, header: FrameHeader, data: memoryview
    ) -> str | None:
        """Write, unless the grant went away since it was looked up."""
        with self._changed:
            if grant is None or self._grants.get(key) is not grant:
                return "the grant was taken back"
            self._writing.append(grant)
        try:
            self._store.write(grant.block_ids, header.region, data)
        finally:
            with self._changed:
                self._writing.remove(grant)
                self._changed.notify_all()
        return None
