"""A network that misbehaves on purpose: a proxy on the data channel, in the test's process.

prefill DEALER ──► ROUTER  shim  DEALER (same identity) ──► ROUTER decode
                      each message: passed on, later, changed, or not at all
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import zmq

from splitserve.wire.codec import decoder_for
from splitserve.wire.messages import DecodeToPrefill, Message, PrefillToDecode
from tests.faults.rendezvous import announce_shim, show_address, waiting_workers

Parts = list[bytes]
Rule = Callable[[Message, Parts], Sequence[tuple[float, Parts]]]  # (seconds from now, what)
POLL_MS = 5


def pass_on(_: Message, parts: Parts) -> Sequence[tuple[float, Parts]]:
    return [(0.0, parts)]


class Shim:
    """Owns a proxy before each decode worker of a cluster, on one thread."""

    def __init__(self) -> None:
        self.rule: Rule = pass_on
        self._directory: Path | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._decoder = decoder_for(PrefillToDecode | DecodeToPrefill)
        self._proxies: list[_Proxy] = []
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="shim", daemon=True)

    @contextlib.contextmanager
    def between(self, directory: Path) -> Iterator[None]:
        """Around a cluster: its decode workers wait for an address from here.

        It ends before `directory` goes: it looks there for workers, and answers with files.
        """
        announce_shim(directory)
        self._directory = directory
        self._thread.start()
        try:
            yield
        finally:
            self._over = True
            self._thread.join(5)
            assert not self._thread.is_alive(), "the shim did not end"

    def _run(self) -> None:
        assert self._directory is not None
        while not self._over:
            for pid, address in waiting_workers(self._directory).items():
                proxy = _Proxy(self._context, address)
                self._proxies.append(proxy)
                show_address(self._directory, pid, proxy.address)
            moved = [self._move(proxy) for proxy in self._proxies]
            while self._later and self._later[0][0] <= time.monotonic():
                heapq.heappop(self._later)[2]()
            if not any(moved):
                self._wait()
        for proxy in self._proxies:
            proxy.close()
        self._context.term()

    def _wait(self) -> None:
        poller = zmq.Poller()
        for socket in [socket for proxy in self._proxies for socket in proxy.sockets]:
            poller.register(socket, zmq.POLLIN)
        poller.poll(POLL_MS)

    def _move(self, proxy: _Proxy) -> bool:
        """Take what has come, and see what the rule makes of it."""
        received = proxy.receive()
        for parts, send in received:
            for delay_s, changed in self.rule(self._decoder.decode(parts[0]), parts):
                entry = (time.monotonic() + delay_s, next(self._count), _bound(send, changed))
                heapq.heappush(self._later, entry)
        return bool(received)


def _bound(send: Callable[[Parts], None], parts: Parts) -> Callable[[], None]:
    return lambda: send(parts)


class _Proxy:
    """Both ends of the way to one decode worker."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], real: str) -> None:
        self._context = context
        self._real = real
        self._front = context.socket(zmq.ROUTER)
        self._front.linger = 0
        self._front.router_handover = True
        self._front.bind("tcp://127.0.0.1:*")
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self.address = self._front.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [self._front, *self._backs.values()]

    def receive(self) -> list[tuple[Parts, Callable[[Parts], None]]]:
        """Messages that are here, each with the way to send it on."""
        received: list[tuple[Parts, Callable[[Parts], None]]] = []
        while self._front.poll(0):
            identity, *parts = self._front.recv_multipart()
            received.append((parts, _sender(self._back(identity))))
        for identity, back in self._backs.items():
            while back.poll(0):
                received.append((back.recv_multipart(), self._forth(identity)))
        return received

    def close(self) -> None:
        for socket in self.sockets:
            socket.close()

    def _back(self, identity: bytes) -> zmq.Socket[bytes]:
        if identity not in self._backs:
            back = self._backs[identity] = self._context.socket(zmq.DEALER)
            back.linger = 0
            back.identity = identity
            back.connect(self._real)
        return self._backs[identity]

    def _forth(self, identity: bytes) -> Callable[[Parts], None]:
        return _sender(self._front, identity)


def _sender(socket: zmq.Socket[bytes], *before: bytes) -> Callable[[Parts], None]:
    def send(parts: Parts) -> None:
        socket.send_multipart([*before, *parts])

    return send
