"""What a channel puts into its inbox, and whom it gives frames to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from splitserve.wire.messages import (
    DecodeToPrefill,
    FirstToken,
    FrameHeader,
    Message,
    PrefillToDecode,
    ToLauncher,
    ToWorker,
)

COORDINATOR = "coordinator"  # the peer of the control channel, in SendFailed


@dataclass(frozen=True, slots=True)
class ControlReceived:
    """A message of the coordinator; it came `at`, on this process's monotonic clock.

    The loop may take it a whole step later.
    """

    message: ToWorker | ToLauncher
    at: float = field(compare=False)


@dataclass(frozen=True, slots=True)
class DataReceived:
    """A message of a peer on the data channel; `peer` is what an answer is sent to."""

    peer: str
    message: PrefillToDecode | DecodeToPrefill
    at: float = field(compare=False)


@dataclass(frozen=True, slots=True)
class FirstTokenSent:
    """A FirstToken left this process `at`: what follows it is counted from then."""

    message: FirstToken
    at: float


@dataclass(frozen=True, slots=True)
class SendFailed:
    """A message was not sent: the peer is gone or unknown, or too much waits for it already."""

    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class RoomAvailable:
    """What is staged for a peer fell to half of the budget, after having been above it."""

    peer: str


@dataclass(frozen=True, slots=True)
class ChannelFailed:
    """The I/O thread ended on a bug of ours; nothing is sent or received any more."""

    reason: str


class FrameSink(Protocol):
    """Takes frames on the I/O thread; what it returns is put into the inbox as it is."""

    def accept(self, header: FrameHeader, data: memoryview) -> object: ...
