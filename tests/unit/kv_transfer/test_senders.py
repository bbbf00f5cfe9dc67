from __future__ import annotations

import socket

from kv_transfer.inproc import InprocSender
from kv_transfer.layout import region_bytes
from kv_transfer.tcp import TcpSender
from splitserve.wire.channel import SendFailed
from splitserve.wire.messages import FrameHeader
from tests.fake_store import LAYOUT, FakeStore, whole
from tests.unit.wire.channels import open_channels

HEADER = FrameHeader("request", 0, "epoch", whole(LAYOUT, 64), 0)
FRAME_BYTES = region_bytes(LAYOUT, HEADER.region)
BLOCKS = (1, 2, 3, 4)


def test_the_room_of_a_peer_that_is_not_there_runs_out_and_blocks_may_be_reused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        peer = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
    store = FakeStore()
    with open_channels() as channels:
        sender = TcpSender(channels.make(), store, budget_bytes=4 * FRAME_BYTES)
        assert sender.room_bytes(peer) == 4 * FRAME_BYTES
        num_sent = 0
        while sender.room_bytes(peer) >= FRAME_BYTES:
            assert sender.send(peer, HEADER, BLOCKS) == FRAME_BYTES
            store.fill(num_sent)  # the prompt's blocks are free as soon as send returns
            num_sent += 1
            assert num_sent < 100
        assert num_sent >= 4
        assert sender.room_bytes("tcp://127.0.0.1:9") == 4 * FRAME_BYTES  # no one else's business


def test_an_unknown_peer_in_process_is_an_event_too() -> None:
    events: list[object] = []
    sender = InprocSender(FakeStore(), {}, events.append)
    assert sender.send("nobody", HEADER, BLOCKS) == FRAME_BYTES
    (event,) = events
    assert isinstance(event, SendFailed) and event.peer == "nobody"
