from __future__ import annotations

import pytest

from kv_transfer import make_receiver, make_sender
from kv_transfer.layout import region_fault
from kv_transfer.receiver import StoreReceiver
from kv_transfer.tcp import TcpSender
from splitserve.errors import ConfigError
from splitserve.wire.channel import Channel
from splitserve.wire.messages import Region
from tests.fake_store import LAYOUT, FakeStore


@pytest.mark.parametrize(
    ("region", "says"),
    [
        (Region(0, 5, 0, 100, 0, 3), None),
        (Region(4, 5, 99, 100, 2, 3), None),
        (Region(0, 6, 0, 100, 0, 3), "layers [0, 6)"),
        (Region(0, 5, 0, 101, 0, 3), "tokens [0, 101)"),
        (Region(0, 5, 0, 100, 0, 4), "KV heads [0, 4)"),
        (Region(2, 2, 0, 100, 0, 3), "layers [2, 2)"),
        (Region(0, 5, 9, 8, 0, 3), "tokens [9, 8)"),
        (Region(-1, 5, 0, 8, 0, 3), "layers [-1, 5)"),
    ],
)
def test_a_region_outside_the_grant_is_named(region: Region, says: str | None) -> None:
    fault = region_fault(LAYOUT, region, 100)
    assert (fault is None) if says is None else (fault is not None and says in fault)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_built_transport_is_made(transport: str) -> None:
    channel = Channel()
    try:
        sender = make_sender(transport, channel, FakeStore())  # type: ignore[arg-type]
        receiver = make_receiver(transport, FakeStore())  # type: ignore[arg-type]
    finally:
        channel.close()
    assert isinstance(sender, TcpSender) and isinstance(receiver, StoreReceiver)


@pytest.mark.parametrize("transport", ["shm", "collective", "nixl"])
def test_one_that_is_not_built_is_refused_by_name(transport: str) -> None:
    with pytest.raises(ConfigError, match=f"{transport}.*not built"):
        make_receiver(transport, FakeStore())  # type: ignore[arg-type]
