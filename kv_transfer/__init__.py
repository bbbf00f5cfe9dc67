"""Moving a prompt's KV from the prefill worker that computed it to a decode worker.

A transport moves bytes and nothing else; Open, Grant and Commit travel on the data channel. Each
transport's library is imported when it is asked for.
"""

from __future__ import annotations

from typing import Literal

from kv_transfer.base import KVReceiver, KVSender, KVStore
from splitserve.errors import ConfigError
from splitserve.wire.channel import Channel

Transport = Literal["auto", "tcp", "shm", "collective", "nixl"]

__all__ = ["Transport", "make_receiver", "make_sender"]


def make_sender(transport: Transport, channel: Channel, store: KVStore) -> KVSender:
    """The sending end of a transport. Raises ConfigError for one that is not built."""
    _check_built(transport)
    from kv_transfer.tcp import TcpSender

    return TcpSender(channel, store)


def make_receiver(transport: Transport, store: KVStore) -> KVReceiver:
    """The receiving end of a transport. Raises ConfigError for one that is not built."""
    _check_built(transport)
    from kv_transfer.receiver import StoreReceiver

    return StoreReceiver(store)


def _check_built(transport: Transport) -> None:
    """auto means tcp, as long as there is no other."""
    if transport not in ("auto", "tcp"):
        raise ConfigError(f"transport {transport!r} is not built yet; use 'tcp'")
