"""Operations of a running cluster's steps: from torch's profiler to the trace for a browser."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from splitserve.calls import address_of
from splitserve.profiling.collected import Collector, Profile
from splitserve.profiling.fetch import profile_stream
from splitserve.profiling.trace import write_trace
from tests.cluster.clients import prompt
from tests.cluster.harness import Ring

TINY = {"prefill": 1, "decode": 1}
PROFILE_S = 2.0
NUM_STEPS = 3


@contextmanager
def requests(ring: Ring) -> Iterator[None]:
    """One after another, all of the same size."""
    over = threading.Event()

    def ask() -> None:
        number = 0
        while not over.is_set():
            ring.complete(prompt(number, 40), max_tokens=4, ignore_eos=True)
            number += 1

    client = threading.Thread(target=ask)
    client.start()
    try:
        yield
    finally:
        over.set()
        client.join(30)


def profile_of(ring: Ring) -> Profile:
    collector = Collector()
    with profile_stream(address_of(ring.base_url, None), PROFILE_S, NUM_STEPS) as chunks:
        for chunk in chunks:
            collector.feed(chunk)
    return collector.profile()


def test_a_few_steps_of_each_worker_are_told_operation_by_operation(ring: Ring) -> None:
    with requests(ring):
        profile = profile_of(ring)
    assert profile.is_whole and (profile.num_dropped, profile.num_unreadable) == (0, 0)
    assert {worker.facts.role for worker in profile.workers} == {"prefill", "decode"}
    for worker in profile.workers:
        assert worker.facts.num_cores >= worker.facts.num_threads
        assert worker.facts.weight_bytes_per_number in (2, 4)
        assert 0 < worker.facts.kv_int8_token_bytes < worker.facts.kv_token_bytes
        within = [
            sum(
                row["ended_at"] - row["forward_s"] - 0.1 <= kernel.start_s <= row["ended_at"]
                for row in worker.steps
            )
            for kernel in worker.kernels
        ]
        assert within and min(within) >= 1, "on the clock of the steps"
    names = [[kernel.name for kernel in worker.kernels] for worker in profile.workers]
    assert all(one.count("aten::index_select") >= NUM_STEPS for one in names)
    text = io.StringIO()
    write_trace(profile, text)
    shown = [event["name"] for event in json.loads(text.getvalue())["traceEvents"]]
    assert shown.count("aten::index_select") == sum(
        one.count("aten::index_select") for one in names
    )
    assert {w["state"] for w in ring.cluster()["workers"]} == {"ready"}
