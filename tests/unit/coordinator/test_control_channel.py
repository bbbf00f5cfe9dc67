"""The launcher's part, and strangers at the control socket."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import zmq

from splitserve.wire import messages as m
from splitserve.wire.codec import Decoder, encode
from splitserve.wire.curve import make_keys
from tests.unit.coordinator.running import RunningCoordinator
from tests.unit.coordinator.scripted_worker import ScriptedWorker, facts


class Launcher:
    """The launcher's end of the control channel."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(endpoint)
        self.say(m.Hello("launcher-1", "launcher", "launcher-1", 1, "here"))

    def say(self, message: m.ToCoordinator) -> None:
        self._socket.send(encode(message))

    def hear(self, kind: type[Any]) -> Any:
        """The next message, which must be of this kind."""
        assert self._socket.poll(5000), f"no {kind.__name__}"
        decoder: Decoder[m.ToLauncher] = Decoder(m.ToLauncher)
        message = decoder.decode(self._socket.recv_multipart()[0])
        assert isinstance(message, kind), message
        return message

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def test_the_launcher_brings_up_scales_and_reports(empty: RunningCoordinator) -> None:
    launcher = Launcher(empty.control_endpoint)
    launcher.hear(m.Welcome)
    assert launcher.hear(m.Targets) == m.Targets(1, 1)
    starts = [launcher.hear(m.Start) for _ in range(2)]
    assert [(s.launch_id, s.role) for s in starts] == [
        ("prefill-0", "prefill"),
        ("decode-0", "decode"),
    ]
    assert {w["state"] for w in empty.cluster()["workers"]} == {"starting"}
    for start in starts:
        start_worker(empty, start)
    assert launcher.hear(m.Ready).base_url == empty.url

    response = empty.http.post("/cluster/scale", json={"prefill": 1, "decode": 2})
    assert response.status_code == 202
    assert response.json() == {"target": {"prefill": 1, "decode": 2}}
    assert launcher.hear(m.Targets) == m.Targets(1, 2)
    start_worker(empty, launcher.hear(m.Start))
    empty.wait(lambda: len(ready(empty)) == 3, "the new worker is ready")

    response = empty.http.post("/cluster/scale", json={"prefill": 1, "decode": 1})
    assert response.status_code == 202
    assert launcher.hear(m.Targets) == m.Targets(1, 1)
    stop = launcher.hear(m.Stop)
    assert (stop.launch_id, stop.grace_s) == ("decode-1", 30.0)
    newest = empty.workers[-1]
    empty.wait(lambda: any(isinstance(x, m.Drain) for x in newest.received), "it hears Drain")
    newest.close()
    launcher.say(m.ProcessExited("decode-1", 4242, 0, ""))
    empty.wait(lambda: len(empty.cluster()["workers"]) == 2, "it is gone")

    launcher.say(m.ProcessExited("decode-0", 4242, -9, "killed"))
    empty.wait(lambda: empty.http.get("/health").status_code == 503, "its death is known at once")
    launcher.close()


def start_worker(coordinator: RunningCoordinator, start: m.Start) -> None:
    coordinator.workers.append(
        ScriptedWorker(
            start.role,
            coordinator.control_endpoint,
            facts(coordinator.fingerprint),
            launch_id=start.launch_id,
        )
    )


def ready(coordinator: RunningCoordinator) -> list[Any]:
    return [w for w in coordinator.cluster()["workers"] if w["state"] == "ready"]


def test_stray_bytes_on_the_control_socket(
    coordinator: RunningCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    """vllm-project/vllm#54757: stray bytes ended the one thread that listened."""
    context = zmq.Context()
    stray = context.socket(zmq.DEALER)
    stray.linger = 0
    stray.connect(coordinator.control_endpoint)
    parts: list[list[bytes]] = [
        [b""],
        [b"", b""],
        [b"x"] * 9,
        [b"\xdd\xff\xff\xff\xff"],
        [bytes(1 << 20)],
        [encode(m.Welcome("e"))],
    ]
    num_before = coordinator.server.service.num_protocol_errors()
    for one in parts:
        stray.send_multipart(one)
    # Well formed, and from nobody: dropped too.
    row = m.TokenRow("r", 0, 0, 0, (1,))
    stray.send(encode(m.Tokens("e", (row,))))
    stray.send(encode(m.Heartbeat("x", "e", 0.0, m.WorkerStats())))
    stray.send(encode(m.Hello("x", "decode", "x", 1, "h")))
    assert stray.poll(5000), "the Hello is answered"
    decoder: Decoder[m.ToWorker] = Decoder(m.ToWorker)
    assert isinstance(decoder.decode(stray.recv()), m.Reject)
    assert coordinator.server.service.num_protocol_errors() == num_before + len(parts)
    assert len([r for r in caplog.records if "control channel" in r.message]) <= 1
    host, _, port = coordinator.control_endpoint.removeprefix("tcp://").partition(":")
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        raw.sendall(b"GET /metrics HTTP/1.1\r\n\r\n" + bytes(1 << 16))
        response = coordinator.http.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 200
    stray.close()
    context.term()


def test_with_keys_only_the_clusters_own_get_in(model: Path) -> None:
    keys = make_keys()
    coordinator = RunningCoordinator(model, keys=keys, num_prefill=0)
    good = ScriptedWorker(
        "decode", coordinator.control_endpoint, facts(coordinator.fingerprint), keys=keys
    )
    rogues = [
        ScriptedWorker("decode", coordinator.control_endpoint, facts(coordinator.fingerprint)),
        ScriptedWorker(
            "decode",
            coordinator.control_endpoint,
            facts(coordinator.fingerprint),
            keys=make_keys(),
        ),
    ]
    coordinator.wait_ready()
    assert coordinator.http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    names = [w["worker_id"] for w in coordinator.cluster()["workers"]]
    assert names == [good.worker_id]
    assert not any(rogue.epoch for rogue in rogues)
    coordinator.close()
    for worker in (good, *rogues):
        worker.close()
