"""`python -m prefill_worker`: one prefill worker, configured through the environment."""

from __future__ import annotations

import sys

from kv_transfer import make_sender
from prefill_worker.worker import PrefillWorker
from splitserve.config import WorkerConfig
from splitserve.membership import Membership
from splitserve.process import num_usable_cores, pin_to_cores
from splitserve.wire.channel import Channel
from splitserve.wire.links import secret_identity
from splitserve.worker_process import facts_of, load_runner, make_recorder, run_role


def serve(config: WorkerConfig, worker_id: str) -> None:
    """Load, join, serve until drained."""
    num_cores = num_usable_cores()  # before it keeps to some of them
    pin_to_cores(config.cores)
    runner = load_runner(config)
    recorder = make_recorder(runner)
    channel = Channel(config.keys)
    channel.connect_control(config.control_endpoint, secret_identity(worker_id))
    membership = Membership(config, channel, worker_id)
    sender = make_sender(config.transport, channel, runner.kv_cache)
    membership.watch_signals()
    try:
        membership.join(facts_of(config, runner, recorder, num_cores))
        PrefillWorker(runner, channel, sender, membership, recorder).run()
    finally:
        membership.leave()


if __name__ == "__main__":
    sys.exit(run_role(serve))
