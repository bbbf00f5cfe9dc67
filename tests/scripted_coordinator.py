"""The coordinator's end of the control channel, driven by a test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import zmq

from splitserve.wire import messages as m
from splitserve.wire.codec import Decoder, encode
from tests.waiting import wait_until

EPOCH = "test-epoch"
REMEMBERED_S = 60.0  # how long a Release is remembered


class ScriptedCoordinator:
    """Owns a ROUTER: welcomes whoever says Hello, keeps what workers say, sends what it is told."""

    def __init__(self) -> None:
        self._bind("tcp://127.0.0.1:*")
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.epoch = EPOCH
        self.hellos: dict[str, m.Hello] = {}
        self.beats: dict[str, m.Heartbeat] = {}  # the last one of each worker
        self.said: list[Any] = []
        self._outbox: list[tuple[bytes, bytes]] = []
        self._lock = threading.Lock()
        self._start()

    def send(self, worker_id: str, message: m.ToWorker) -> None:
        with self._lock:
            self._outbox.append((worker_id.encode(), encode(message)))

    def release(self, worker_id: str, request_id: str, attempt: int = 0) -> None:
        self.send(worker_id, m.Release(request_id, attempt, self.epoch, REMEMBERED_S))

    def come_back(self, epoch: str) -> None:
        """After `close`: another coordinator at the same address, which knows nobody."""
        self.hellos.clear()
        self.epoch = epoch
        self._bind(self.endpoint)
        self._start()

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
        wait_until(condition, timeout_s, what)

    def of(self, kind: type[Any]) -> list[Any]:
        """Everything of one kind that was said so far."""
        return [message for message in list(self.said) if isinstance(message, kind)]

    def close(self) -> None:
        self._stopping = True
        self._thread.join(5.0)
        self._socket.close()

    def _bind(self, endpoint: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        wait_until(lambda: self._binds(endpoint), 10.0, f"{endpoint} is free again")

    def _binds(self, endpoint: str) -> bool:
        """ZeroMQ lets go of a closed socket's port a little later."""
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
            return False
        return True

    def _start(self) -> None:
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        decoder: Decoder[m.ToCoordinator] = Decoder(m.ToCoordinator)
        while not self._stopping:
            with self._lock:
                outbox, self._outbox = self._outbox, []
            for identity, data in outbox:
                self._socket.send_multipart([identity, data])
            if self._socket.poll(5):
                identity, data = self._socket.recv_multipart()
                self._take(identity, decoder.decode(data))

    def _take(self, identity: bytes, message: m.ToCoordinator) -> None:
        match message:
            case m.Hello():
                self.hellos[message.worker_id] = message
                self._socket.send_multipart([identity, encode(m.Welcome(self.epoch))])
            case m.Heartbeat():
                self.beats[message.worker_id] = message
                self._socket.send_multipart([identity, encode(m.HeartbeatAck(self.epoch))])
            case _:
                self.said.append(message)
