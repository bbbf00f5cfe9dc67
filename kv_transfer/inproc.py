"""KV within one process, by plain calls: what the other transports are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import xxhash

from kv_transfer.base import KVReceiver, KVSender, KVStore
from splitserve.wire.channel import STAGING_BUDGET_BYTES, SendFailed
from splitserve.wire.messages import FrameHeader


class InprocSender(KVSender):
    """Gives each frame to the receiver of its peer at once, on the caller's thread.

    `post` gets what the receiver made of it, or SendFailed when there is no such peer.
    """

    def __init__(
        self,
        store: KVStore,
        receivers: Mapping[str, KVReceiver],
        post: Callable[[object], None],
    ) -> None:
        self._store = store
        self._receivers = receivers
        self._post = post

    def room_bytes(self, peer: str) -> int:
        return STAGING_BUDGET_BYTES  # nothing ever waits

    def send(self, peer: str, header: FrameHeader, block_ids: Sequence[int]) -> int:
        data = self._store.read(block_ids, header.region)
        header = replace(header, checksum=xxhash.xxh3_64_intdigest(data))
        receiver = self._receivers.get(peer)
        if receiver is None:
            self._post(SendFailed(peer, header))
        else:
            self._post(receiver.accept(header, data))
        return data.nbytes
