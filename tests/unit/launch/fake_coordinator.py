"""A coordinator without HTTP: it starts workers, tells Ready, and obeys its model's name.

It prints its config, what it hears, and `life PID` when it has bound its socket.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys

import zmq

from splitserve.config import (
    READY_FD_ENV,
    ROLE_CONFIG_ENV,
    CoordinatorConfig,
    Promises,
    Role,
    from_json,
)
from splitserve.process import die_with_parent
from splitserve.wire import messages as m
from splitserve.wire.codec import decoder_for, encode


class FakeCoordinator:
    """Owns a ROUTER. `config.model` is a list of words, each a way to behave."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        self.ways = config.model.split()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.router = context.socket(zmq.ROUTER)
        self.router.linger = 0
        self.epoch = secrets.token_hex(4)
        self.launcher = b""
        self.num_hellos = 0
        self.num_wanted = config.num_prefill + config.num_decode

    def run(self) -> None:
        self.misbehave()
        self.router.bind(f"tcp://127.0.0.1:{self.config.control_port or '*'}")
        port = int(self.router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        ports = f"http {self.config.port} control {port}"
        wanted = f"wants {self.config.num_prefill}+{self.config.num_decode}"
        print(f"life {os.getpid()} {ports} {wanted} {self.config.successor}", flush=True)
        with os.fdopen(int(os.environ[READY_FD_ENV]), "w") as pipe:
            print(json.dumps({"control_endpoint": f"tcp://127.0.0.1:{port}"}), file=pipe)
        decoder = decoder_for(m.ToCoordinator)
        while self.router.poll(60_000):
            identity, data = self.router.recv_multipart()
            self.on_message(identity, decoder.decode(data))

    def misbehave(self) -> None:
        if "coordinator-dies" in self.ways:
            sys.exit("no such port")
        if "successor-dies" in self.ways and self.config.successor:
            sys.exit(f"no luck with {self.config.control_port}")
        if "successor-hangs" in self.ways and self.config.successor:
            signal.pause()

    def on_message(self, identity: bytes, message: m.ToCoordinator) -> None:
        match message:
            case m.Hello(role="launcher"):
                self.launcher = identity
                self.on_launcher(message)
            case m.Hello():
                self.num_hellos += 1
                if self.num_hellos == self.num_wanted:
                    self.on_all_here()
            case m.Heartbeat():
                self.tell(m.HeartbeatAck(message.epoch))
            case m.ProcessExited():
                print(f"told {message.launch_id} exited {message.exit_code}", flush=True)
                self.on_exited(message.launch_id)

    def on_launcher(self, hello: m.Hello) -> None:
        self.tell(m.Reject("no") if "rejects" in self.ways else m.Welcome(self.epoch))
        launches = [one.launch_id + ", leaving" * one.stopping for one in hello.launches]
        print(f"told of {sorted(launches)}", flush=True)
        if self.config.successor:
            return
        for number in range(self.config.num_prefill):
            self.start("prefill", number)
        for number in range(self.config.num_decode):
            self.start("decode", number)

    def on_all_here(self) -> None:
        if "stops-first" in self.ways:
            self.tell(m.Stop("prefill-0", 1.5))
        self.tell(m.Targets(3, 4))
        self.tell(m.Ready(self.epoch, "http://127.0.0.1:1", Promises(10, 20, 1, 2, 16)))

    def on_exited(self, launch_id: str) -> None:
        if launch_id != "prefill-0":
            return
        if "replaces" in self.ways:
            self.start("prefill", 7)
        if "stops" in self.ways:
            self.tell(m.Stop("decode-0", 0.2))

    def start(self, role: Role, number: int) -> None:
        self.tell(m.Start(f"{role}-{number}", role))

    def tell(self, message: m.ToLauncher) -> None:
        self.router.send_multipart([self.launcher, encode(message)])


if __name__ == "__main__":
    config = from_json(CoordinatorConfig, os.environ[ROLE_CONFIG_ENV])
    die_with_parent(config.parent_pid)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("coordinator says goodbye"))
    FakeCoordinator(config).run()
