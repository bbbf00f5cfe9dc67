"""CurveZMQ: who may speak on control and data sockets off loopback.

One cluster has one server key pair and one client key pair, made by the launcher and handed to its
processes. A server admits the cluster's client key and nothing else: a ZAP handler in the server's
context checks it. Without that handler libzmq would let in anyone who knows the server's public
key, so the context's servers name a ZAP domain and enforce it.
"""

from __future__ import annotations

from typing import Any

import zmq
import zmq.asyncio
import zmq.auth
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.auth.thread import ThreadAuthenticator

from splitserve.config import CurveKeys
from splitserve.errors import ConfigError
from splitserve.hosts import is_loopback

_DOMAIN = "splitserve"


def make_keys() -> CurveKeys:
    """New random keys for one cluster."""
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    return CurveKeys(
        server_public=server_public.decode(),
        server_secret=server_secret.decode(),
        client_public=client_public.decode(),
        client_secret=client_secret.decode(),
    )


def apply_server(socket: zmq.Socket[Any], keys: CurveKeys) -> None:
    """Make a socket, before it binds, admit only clients that the context's ZAP handler knows."""
    socket.curve_server = True
    socket.curve_publickey = keys.server_public.encode()
    socket.curve_secretkey = keys.server_secret.encode()
    socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def apply_client(socket: zmq.Socket[Any], keys: CurveKeys) -> None:
    """Make a socket, before it connects, prove the cluster's client key to a known server."""
    socket.curve_serverkey = keys.server_public.encode()
    socket.curve_publickey = keys.client_public.encode()
    socket.curve_secretkey = keys.client_secret.encode()


def authenticate(context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys) -> ThreadAuthenticator:
    """Start the ZAP handler of a plain context, on a thread of its own. The caller stops it."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(_DOMAIN, _OneKey(keys))
    return authenticator


def authenticate_asyncio(context: zmq.asyncio.Context, keys: CurveKeys) -> AsyncioAuthenticator:
    """Start the ZAP handler of an asyncio context, on the running loop. The caller stops it."""
    authenticator = AsyncioAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(_DOMAIN, _OneKey(keys))
    return authenticator


class _OneKey:
    """What pyzmq's authenticators ask about a client's key (Z85)."""

    def __init__(self, keys: CurveKeys) -> None:
        self._admitted = keys.client_public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._admitted


def check_bind(host: str, keys: CurveKeys | None) -> None:
    """Raises ConfigError when a socket would bind off loopback without keys."""
    if keys is None and not is_loopback(host):
        raise ConfigError(
            f"refused to bind {host} without keys: off loopback, control and data sockets need "
            "CurveZMQ keys"
        )
