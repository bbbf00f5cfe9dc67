from __future__ import annotations

import asyncio

import pytest
import zmq
import zmq.asyncio

from splitserve.errors import ConfigError
from splitserve.hosts import is_loopback
from splitserve.wire.curve import (
    apply_client,
    apply_server,
    authenticate_asyncio,
    check_bind,
    make_keys,
)
from tests.unit.wire.channels import raw_socket


def test_keys_are_new_each_time_and_make_pairs() -> None:
    keys = make_keys()
    assert keys != make_keys()
    assert zmq.curve_public(keys.server_secret.encode()).decode() == keys.server_public
    assert zmq.curve_public(keys.client_secret.encode()).decode() == keys.client_public


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1", "[::1]"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    check_bind(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "*", "", "localhost.example.org"])
def test_everything_else_needs_keys(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match="keys"):
        check_bind(host, None)
    check_bind(host, make_keys())


def test_an_asyncio_server_admits_only_the_clusters_key() -> None:
    asyncio.run(_serve_two_clients())


async def _serve_two_clients() -> None:
    keys, other = make_keys(), make_keys()
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as server:
        authenticator = authenticate_asyncio(context, keys)
        server.linger = 0
        apply_server(server, keys)
        server.bind("tcp://127.0.0.1:*")
        endpoint = server.getsockopt_string(zmq.LAST_ENDPOINT)
        with raw_socket(zmq.DEALER) as stranger, raw_socket(zmq.DEALER) as client:
            apply_client(stranger, other)
            stranger.curve_serverkey = keys.server_public.encode()
            apply_client(client, keys)
            for socket, text in ((stranger, b"stranger"), (client, b"client")):
                socket.connect(endpoint)
                socket.send(text)
            received = await asyncio.wait_for(server.recv_multipart(), 5)
            assert received[1] == b"client"
            assert not await server.poll(300)
        authenticator.stop()


def test_without_a_zap_handler_nobody_is_admitted() -> None:
    """A server whose handler is missing must not fall back to letting everybody in."""
    keys = make_keys()
    with raw_socket(zmq.ROUTER) as server, raw_socket(zmq.DEALER) as client:
        apply_server(server, keys)
        server.bind("tcp://127.0.0.1:*")
        apply_client(client, keys)
        client.connect(server.getsockopt_string(zmq.LAST_ENDPOINT))
        client.send(b"hello")
        assert not server.poll(300)
