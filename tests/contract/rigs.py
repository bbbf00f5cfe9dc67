"""One prefill side and one decode side over each transport, behind the same few words."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_transfer.base import FrameDropped, FrameWritten, KVReceiver, KVSender
from kv_transfer.inproc import InprocSender
from kv_transfer.receiver import StoreReceiver
from kv_transfer.tcp import TcpSender
from splitserve.config import CurveKeys
from splitserve.wire.channel import Channel
from splitserve.wire.curve import make_keys
from splitserve.wire.messages import FrameHeader
from tests.fake_store import FakeStore

Outcome = FrameWritten | FrameDropped
TRANSPORTS = ("inproc", "tcp", "tcp-curve")


@dataclass
class Rig:
    """`inject` puts a frame on the wire exactly as given, right or wrong."""

    prefill: FakeStore
    decode: FakeStore
    sender: KVSender
    receiver: StoreReceiver
    peer: str
    inject: Callable[[FrameHeader, bytes], None]
    receive: Callable[[float], list[object]]
    close: Callable[[], None] = field(default=lambda: None)

    def outcomes(self, number: int, timeout_s: float = 10.0) -> list[Outcome]:
        """What became of the next `number` frames."""
        deadline = time.monotonic() + timeout_s
        found: list[Outcome] = []
        while len(found) < number:
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"{len(found)} of {number} frames came out"
            found += [e for e in self.receive(left_s) if isinstance(e, FrameWritten | FrameDropped)]
        return found


def make_rig(transport: str, decode: FakeStore | None = None) -> Rig:
    prefill, decode = FakeStore(), decode or FakeStore()
    prefill.fill(seed=1)
    receiver = StoreReceiver(decode)
    if transport == "inproc":
        return _inproc(prefill, decode, receiver)
    return _tcp(prefill, decode, receiver, make_keys() if transport == "tcp-curve" else None)


def _inproc(prefill: FakeStore, decode: FakeStore, receiver: StoreReceiver) -> Rig:
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    receivers: dict[str, KVReceiver] = {"decode": receiver}
    return Rig(
        prefill=prefill,
        decode=decode,
        sender=InprocSender(prefill, receivers, inbox.put),
        receiver=receiver,
        peer="decode",
        inject=lambda header, data: inbox.put(receiver.accept(header, memoryview(data))),
        receive=lambda timeout_s: [inbox.get(timeout=timeout_s)],
    )


def _tcp(
    prefill: FakeStore, decode: FakeStore, receiver: StoreReceiver, keys: CurveKeys | None
) -> Rig:
    decode_channel, prefill_channel = Channel(keys, receiver), Channel(keys)
    endpoint = decode_channel.bind_data("127.0.0.1")

    def close() -> None:
        prefill_channel.close()
        decode_channel.close()

    return Rig(
        prefill=prefill,
        decode=decode,
        sender=TcpSender(prefill_channel, prefill),
        receiver=receiver,
        peer=endpoint,
        inject=lambda header, data: prefill_channel.send_data(endpoint, header, memoryview(data)),
        receive=decode_channel.receive,
        close=close,
    )
