"""In whatever order processes start, they find each other; over real sockets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from splitserve.wire import messages as m
from tests.ring import TIMEOUT_S, Ring, open_ring, prompt_of

HEAD_START_S = 0.05  # of each process, when nobody is there to answer it


@pytest.fixture
def ring() -> Iterator[Ring]:
    with open_ring() as ring:
        ring.coordinator.close()
        yield ring


@pytest.mark.parametrize(
    "order", list(itertools.permutations(["coordinator", "prefill", "decode"])), ids=" ".join
)
def test_every_order_of_starts_ends_in_a_ring_that_serves(
    ring: Ring, order: tuple[str, ...]
) -> None:
    """ai-dynamo/dynamo #8534: a worker that was started in another order never got traffic."""
    starts = {
        "coordinator": lambda: ring.coordinator.come_back("first"),
        "prefill": ring.start_prefill,
        "decode": ring.start_decode,
    }
    with ThreadPoolExecutor(len(order)) as pool:
        started: list[Future[object]] = []
        for name in order:
            started.append(pool.submit(starts[name]))  # type: ignore[arg-type]
            wait(started, HEAD_START_S)
        for one in started:
            one.result(TIMEOUT_S)
    assert set(ring.coordinator.hellos) == {"prefill", "decode"}
    prompt = prompt_of(1, 30)
    ring.ask("a", prompt)
    ring.expect_answer("a", prompt)
    ring.wait_for(lambda: bool(ring.coordinator.of(m.HandedOver)), "HandedOver")


def test_a_worker_that_comes_later_serves_and_goes_again_without_a_failure(ring: Ring) -> None:
    """ai-dynamo/dynamo #8534: a worker that came later never got traffic.

    It is enough to name the new address: nobody was told of it before.
    """
    ring.coordinator.come_back("first")
    ring.start_decode()
    ring.start_prefill()
    ring.ask("before", prompt_of(1, 30))
    ring.expect_answer("before", prompt_of(1, 30))
    ring.start_decode("later")
    ring.start_prefill("also later")
    for number, (prefill, decode) in enumerate(
        itertools.product(("prefill", "also later"), ("decode", "later"))
    ):
        ring.ask(f"r{number}", prompt_of(number, 20), to=(prefill, decode))
        ring.expect_answer(f"r{number}", prompt_of(number, 20))
    ring.wait_until_empty("also later")
    ring.vanish("later")
    ring.vanish("also later")
    ring.peer_gone("later", reaped=True)
    ring.peer_gone("also later", reaped=True)
    ring.ask("after", prompt_of(2, 30))
    ring.expect_answer("after", prompt_of(2, 30))
    assert ring.coordinator.of(m.Failed) == []
