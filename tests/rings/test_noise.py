"""Well-formed messages that make no sense, at both ends of the data channel: the loops go on.

vllm-project/vllm PR#38731: one message that nobody expected ended the thread that took it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import hypothesis
import pytest
import zmq
from hypothesis import strategies as st

from splitserve.wire import messages as m
from splitserve.wire.codec import decoder_for, encode
from tests.fake_runner import LAYOUT
from tests.ring import RawPrefill, Ring, open_ring, prompt_of
from tests.unit.wire.channels import raw_router
from tests.unit.wire.noise import noise

PROMPT = prompt_of(1, 40)
SMALL = st.integers(0, 50)
REGION = noise(
    m.Region,
    **dict.fromkeys(("token_start", "token_end"), SMALL),
    **{name: st.integers(0, 3) for name in ("layer_start", "layer_end", "head_start", "head_end")},
)


@pytest.fixture(scope="module")
def ring() -> Iterator[Ring]:
    with open_ring() as ring:
        ring.start_decode()
        ring.start_prefill()
        yield ring


def settings(num_examples: int) -> hypothesis.settings:
    return hypothesis.settings(max_examples=num_examples, deadline=None, database=None)


def known(ring: Ring, **more: Any) -> dict[str, st.SearchStrategy[Any]]:
    """Values that mean something here."""
    return {
        "request_id": st.just("held"),
        "attempt": st.integers(0, 2),
        "epoch": st.just(ring.coordinator.epoch),
        "to_worker_id": st.just("decode"),
        "layout": st.just(LAYOUT),
        "token_ids": st.just(PROMPT),
        "num_prompt_tokens": SMALL,
        "first_missing_token": SMALL,
        "region": REGION,
        "missing": st.lists(REGION, max_size=3).map(tuple),
        **more,
    }


def about_held(message: Any, request_id: str) -> Any:
    """Names the hand-off of this round, if it names the one that is held."""
    is_about = message.request_id == "held"
    return dataclasses.replace(message, request_id=request_id) if is_about else message


def await_message(stray: zmq.Socket[bytes], kind: type) -> bytes:
    """Who sent a message of this kind; what comes before it is dropped."""
    while stray.poll(10_000):
        identity, form, *_ = stray.recv_multipart()
        if isinstance(decoder_for(m.PrefillToDecode).decode(form), kind):
            return identity
    raise AssertionError(f"no {kind.__name__}")


def test_a_decode_worker_that_is_told_nonsense_goes_on(ring: Ring) -> None:
    """By its peer, in the middle of a hand-off that it has granted."""
    serial = iter(range(10**6))

    @settings(60)
    @hypothesis.given(
        st.lists(st.tuples(noise(m.PrefillToDecode, **known(ring)), st.binary()), max_size=6)
    )
    def tell(said: list[tuple[m.PrefillToDecode, bytes]]) -> None:
        held = f"held {next(serial)}"
        with closing(RawPrefill(ring)) as raw:
            raw.open(held, PROMPT)
            raw.answer(m.Grant)
            for message, data in said:
                about = about_held(message, held)
                if isinstance(about, m.FrameHeader):
                    raw.frame(about.request_id, about.region, data, about.attempt)
                else:
                    raw.say(about)
            raw.say(m.Abort(held, 5, ring.coordinator.epoch))
            ring.ask(f"after {held}", PROMPT)
            ring.expect_answer(f"after {held}", PROMPT)

    tell()


def test_a_prefill_worker_that_is_told_nonsense_goes_on(ring: Ring) -> None:
    """By what it takes for a decode worker."""
    serial = iter(range(10**6))

    @settings(60)
    @hypothesis.given(st.lists(noise(m.DecodeToPrefill, **known(ring)), max_size=6))
    def tell(said: list[m.DecodeToPrefill]) -> None:
        held = f"held {next(serial)}"
        with raw_router() as (stray, endpoint):
            ring.coordinator.hellos["rogue"] = m.Hello("rogue", "decode", "r", 1, "h", (endpoint,))
            ring.ask(held, PROMPT, to=("prefill", "rogue"))
            identity = await_message(stray, m.Open)
            stray.send_multipart([identity, encode(m.Grant(held, 0, ring.coordinator.epoch, 0))])
            await_message(stray, m.Commit)
            for message in said:
                stray.send_multipart([identity, encode(about_held(message, held))])
            ring.ask(f"after {held}", PROMPT)
            ring.expect_answer(f"after {held}", PROMPT)
            ring.release(held)
            ring.peer_gone("rogue")

    tell()
