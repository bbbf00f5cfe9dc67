"""KV over the data channel's own ZeroMQ sockets: one header and one buffer a frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import xxhash

from kv_transfer.base import KVSender, KVStore
from splitserve.wire.channel import Channel
from splitserve.wire.messages import FrameHeader


class TcpSender(KVSender):
    """Copies regions into buffers that the channel sends from: a slow peer pins no KV blocks."""

    def __init__(self, channel: Channel, store: KVStore, budget_bytes: int | None = None) -> None:
        """`budget_bytes` bounds what may wait for one peer; None: as much as the channel takes."""
        self._channel = channel
        self._store = store
        self._budget_bytes = channel.staging_budget_bytes if budget_bytes is None else budget_bytes

    def room_bytes(self, peer: str) -> int:
        return max(0, self._budget_bytes - self._channel.staged_bytes(peer))

    def send(self, peer: str, header: FrameHeader, block_ids: Sequence[int]) -> int:
        data = self._store.read(block_ids, header.region)
        checksum = xxhash.xxh3_64_intdigest(data)
        self._channel.send_data(peer, replace(header, checksum=checksum), data)
        return data.nbytes
