"""The seams of a KV transfer: who holds blocks, who sends bytes, who takes them in.

    prefill engine thread                    wire                decode I/O thread
    KVSender.send(peer, key, region) ── FrameHeader + buffer ──► KVReceiver.accept(header, buffer)
        │ reads                                                       │ writes
        ▼                                                             ▼
    KVStore (its blocks)                                          KVStore (granted blocks)

A transfer is named by its `TransferKey`. Tokens and blocks are numbered within the request; a
physical block id never leaves its owner.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from splitserve.config import KVLayout
from splitserve.wire.messages import FrameHeader, Region


class TransferKey(NamedTuple):
    request_id: str
    attempt: int


class KVStore(Protocol):
    """Paged KV memory, addressed by a request's block table.

    `block_ids[i]` holds the request's tokens [i * block_size, (i + 1) * block_size).
    """

    @property
    def layout(self) -> KVLayout: ...

    def read(self, block_ids: Sequence[int], region: Region) -> memoryview:
        """A copy of the region: C-contiguous bytes [layers, 2, tokens, heads, head_dim]."""
        ...

    def write(self, block_ids: Sequence[int], region: Region, data: memoryview) -> None:
        """Write such bytes into the region. ValueError when the size is not the region's."""
        ...


@dataclass(frozen=True, slots=True)
class FrameWritten:
    """A frame of a live grant was verified and written."""

    key: TransferKey
    region: Region
    num_bytes: int


@dataclass(frozen=True, slots=True)
class FrameDropped:
    """A frame was not written: its attempt is not granted here, or its bytes are wrong."""

    key: TransferKey
    reason: str


class KVSender(ABC):
    """The prefill side of a transport. Called on the engine thread only."""

    @abstractmethod
    def room_bytes(self, peer: str) -> int:
        """How many bytes may be staged for this peer now. Never blocks."""

    @abstractmethod
    def send(self, peer: str, header: FrameHeader, block_ids: Sequence[int]) -> int:
        """Copy the header's region out of the store and queue it; the checksum is filled in here.

        Returns the number of bytes queued. Blocks may be reused once this returns.
        """


class KVReceiver(ABC):
    """The decode side of a transport.

    `one_sided`: peers write into granted blocks themselves, so that a grant taken back does not
    stop a peer that never hears of it. Otherwise all writes go through `accept`.
    `grant` and `revoke` are called on the engine thread, `accept` on the I/O thread.
    """

    one_sided: ClassVar[bool] = False

    @abstractmethod
    def grant(
        self, key: TransferKey, block_ids: Sequence[int], num_tokens: int, first_token: int = 0
    ) -> None:
        """Let frames of this transfer write tokens [first_token, num_tokens) of these blocks.

        Blocks before that may be others' too.
        """

    @abstractmethod
    def revoke(self, key: TransferKey) -> None:
        """Take the grant back. When this returns no write is in flight; unknown keys are fine."""

    @abstractmethod
    def accept(self, header: FrameHeader, data: memoryview) -> FrameWritten | FrameDropped:
        """Verify a frame and write it, or say why not. Never raises on bad input."""
