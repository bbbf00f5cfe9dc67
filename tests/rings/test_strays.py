"""Hand-offs that one side has forgotten and the other has not, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from splitserve.wire import messages as m
from tests.ring import RawPrefill, Ring, open_ring, prompt_of

PROMPT = prompt_of(1, 60)


@pytest.fixture
def ring() -> Iterator[Ring]:
    with open_ring() as ring:
        yield ring


def lose_first_abort(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> list[m.Abort]:
    """Those of the prefill worker; what it says after that arrives."""
    channel = ring.workers["prefill"]._channel
    send, aborts = channel.send_data, []

    def lossy(peer: str, message: Any, *buffer: Any) -> None:
        if isinstance(message, m.Abort):
            aborts.append(message)
            if len(aborts) == 1:
                return
        send(peer, message, *buffer)

    monkeypatch.setattr(channel, "send_data", lossy)
    return aborts


def test_a_grant_of_a_forgotten_prompt_gives_its_blocks_back(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its one Abort was lost: the blocks were reserved for as long as a step may take."""
    stuck = ring.start_decode()
    ring.start_prefill()
    aborts = lose_first_abort(ring, monkeypatch)
    stuck.step_s = 60.0
    stuck.at_full_speed.clear()
    ring.ask("busy", prompt_of(2, 8), to=("decode", None))
    ring.wait_for(lambda: bool(ring.workers["decode"].scheduler.sequences), "it computes")
    ring.ask("a", PROMPT)
    ring.wait_for(lambda: bool(ring.rows("a")), "opened and computed")
    ring.coordinator.release("prefill", "a")
    ring.wait_until_empty("prefill")
    assert len(aborts) == 1
    stuck.at_full_speed.set()
    ring.expect_answer("busy", prompt_of(2, 8))
    ring.wait_until_empty("decode")
    assert aborts[1:] == aborts[:1], "said again, and that once"
    assert ring.coordinator.of(m.Failed) == []


def test_an_abort_of_an_older_attempt_leaves_the_newer_one_alone(ring: Ring) -> None:
    """So a prefill worker may say it whenever it hears of an attempt that it has left behind."""
    ring.start_decode()
    runner = ring.start_slow_prefill()
    with closing(RawPrefill(ring)) as raw:
        raw.open("a", PROMPT)
        raw.answer(m.Grant)
        ring.ask(("a", 1), PROMPT)
        decode = ring.workers["decode"]
        ring.wait_for(lambda: decode.stats().num_kv_bytes_received > 0, "some KV has arrived")
        raw.say(m.Abort("a", 0, ring.coordinator.epoch))
        assert [raw.answer(m.AbortAck).attempt for _ in range(2)] == [0, 0]
        runner.at_full_speed.set()
        ring.expect_answer("a", PROMPT)
    assert ring.coordinator.of(m.Failed) == []
