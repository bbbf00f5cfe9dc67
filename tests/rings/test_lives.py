"""Workers that outlive their coordinator, and how they leave; over real sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from splitserve.wire import messages as m
from tests.ring import Ring, open_ring, prompt_of

PROMPT = prompt_of(1, 60)


@pytest.fixture
def ring() -> Iterator[Ring]:
    with open_ring() as ring:
        yield ring


def replace_coordinator(ring: Ring) -> None:
    ring.coordinator.close()
    ring.coordinator.come_back("next")
    wait_for_hellos(ring)


def wait_for_hellos(ring: Ring) -> None:
    here = [name for name in ring.workers if not ring.has_left(name)]
    ring.wait_for(lambda: set(ring.coordinator.hellos) >= set(here), "all say Hello again")


def test_a_new_coordinator_finds_every_worker_empty_and_serving(ring: Ring) -> None:
    """sgl-project/sglang#6215: what the old one had asked for must not be left over."""
    ring.start_decode(num_blocks=200).at_full_speed.clear()
    ring.start_prefill(max_num_batched_tokens=4).at_full_speed.clear()
    ring.ask("running", prompt_of(2, 5), max_tokens=500)
    ring.wait_for_tokens("running", 2)
    ring.ask("coming", PROMPT)
    decode = ring.workers["decode"]
    ring.wait_for(lambda: decode.stats().num_transfers_in_flight == 1, "a transfer is on its way")
    replace_coordinator(ring)
    assert m.Held("running", 0) in ring.coordinator.hellos["decode"].held
    assert ring.coordinator.hellos["prefill"].held == (m.Held("coming", 0),)
    ring.wait_for(ring.drained, "all is freed")
    ring.ask("new", PROMPT)
    ring.expect_answer("new", PROMPT, 8)


def test_what_an_older_coordinator_said_is_not_obeyed(ring: Ring) -> None:
    ring.start_decode()
    ring.start_prefill()
    old = ring.coordinator.epoch
    replace_coordinator(ring)
    for name in ring.workers:
        ring.coordinator.send(name, m.Drain(old, 0.0))
        ring.coordinator.send(name, m.PeerGone("prefill", old, reaped=False))
    ring.ask("a", PROMPT)
    ring.expect_answer("a", PROMPT, 8)


def test_a_signalled_worker_finishes_then_leaves_when_nothing_more_comes(ring: Ring) -> None:
    """ai-dynamo/dynamo#9344: scale-down killed the answers that were being written."""
    runner = ring.start_decode(num_blocks=128)
    runner.at_full_speed.clear()
    ring.start_prefill()
    prompt = prompt_of(2, 5)
    ring.ask("a", prompt, max_tokens=60)
    ring.wait_for_tokens("a", 2)
    for name in ("decode", "prefill"):
        ring.signal(name)
        ring.wait_for(lambda name=name: ring.draining(name), "it says so")  # type: ignore[misc]
    ring.ask("b", PROMPT)
    ring.wait_for(lambda: bool(ring.coordinator.of(m.Failed)), "b is refused")
    failed = ring.coordinator.of(m.Failed)[0]
    assert failed.retriable and not failed.kept and "draining" in failed.reason
    assert not ring.has_left("prefill")  # idle, but something may still be on its way to it
    ring.coordinator.send("prefill", m.Drain(ring.coordinator.epoch, 30.0))
    ring.wait_for(lambda: ring.has_left("prefill"), "the prefill worker leaves")
    ring.coordinator.send("decode", m.Drain(ring.coordinator.epoch, 30.0))
    assert not ring.has_left("decode")
    runner.at_full_speed.set()
    ring.expect_answer("a", prompt, 60)
    ring.wait_for(lambda: ring.has_left("decode"), "the decode worker leaves")


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_a_draining_worker_without_a_coordinator_leaves(ring: Ring, name: str) -> None:
    ring.start_decode()
    ring.start_prefill()
    ring.signal(name)
    ring.wait_for(lambda: ring.draining(name), "it says so")
    assert not ring.has_left(name)
    ring.coordinator.close()
    ring.wait_for(lambda: ring.has_left(name), "it leaves")
    ring.coordinator.come_back("next")
    wait_for_hellos(ring)


def test_a_worker_without_a_coordinator_stays(ring: Ring) -> None:
    ring.start_decode(num_blocks=128)
    ring.start_prefill()
    ring.ask("a", PROMPT, max_tokens=300)
    ring.wait_for_tokens("a", 2)
    ring.coordinator.close()
    ring.wait_for(ring.drained, "the answer is written to its end")
    assert not ring.has_left("decode") and not ring.has_left("prefill")
    ring.coordinator.come_back("next")
    wait_for_hellos(ring)
