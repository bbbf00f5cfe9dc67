"""A worker without a model: it says Hello and then does what its model's name says."""

from __future__ import annotations

import os
import signal
import socket
import sys

import zmq

from splitserve.config import ROLE_CONFIG_ENV, WorkerConfig, from_json
from splitserve.process import die_with_parent, pin_to_cores
from splitserve.wire.codec import encode
from splitserve.wire.messages import Hello

if __name__ == "__main__":
    config = from_json(WorkerConfig, os.environ[ROLE_CONFIG_ENV])
    die_with_parent(config.parent_pid)
    pin_to_cores(config.cores)
    ways = config.engine.model.split()
    if f"{config.role}-dies" in ways:
        print("loading weights", flush=True)
        sys.exit("shard 3 is corrupt")
    if f"{config.role}-hangs" in ways:
        signal.pause()
    if "ignores-sigterm" in ways:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "says-goodbye" in ways:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"{config.role} says goodbye"))
    dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    dealer.linger = 1000
    dealer.connect(config.control_endpoint)
    hello = Hello(
        config.launch_id, config.role, config.launch_id, os.getpid(), socket.gethostname()
    )
    dealer.send(encode(hello))
    print(f"cores {config.cores} threads {config.engine.num_threads} pid {os.getpid()}", flush=True)
    signal.pause()
