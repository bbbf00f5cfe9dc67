"""Parts of a request's time add up, are never negative, and are unknown rather than wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.timeline import Timeline
from splitserve.wire.parts import Begun, HandoffTimes

FIRST_TOKEN = ("queue_s", "prefill_s", "delivery_s")
HANDOFF = ("grant_wait_s", "transfer_s", "decode_wait_s", "first_step_s")
TIMES = HandoffTimes(0.5, 1.0, 3.0, 0.25, 2.5)
BEGUN = Begun("r", 0, 0.75, 0.25)


def handed_over() -> Timeline:
    """Received at 10, first token at 14.5, second at 17."""
    timeline = Timeline(arrived_at=10.0)
    timeline.dispatched("p", "d", 0, now=11.0)
    timeline.prompt_computed(0, queued_s=1.0, prefill_s=2.0)
    timeline.tokens_delivered(0, now=14.5)
    timeline.handed_over(0, 1000, TIMES)
    timeline.decode_began(0, BEGUN)
    timeline.tokens_delivered(1, now=17.0)
    return timeline


def known(timeline: Timeline, *names: str) -> list[Any]:
    report = timeline.report()
    return [report[name] for name in names]


def test_the_parts_of_the_first_token_and_of_the_hand_off_add_up() -> None:
    timeline = handed_over()
    assert known(timeline, *FIRST_TOKEN) == [2.0, 2.0, 0.5]
    assert timeline.ttft_s == 4.5
    assert known(timeline, *HANDOFF) == [0.5, 1.0, 0.75, 0.25]
    assert timeline.handoff_gap_s == sum(known(timeline, *HANDOFF)) == 2.5


def test_a_streams_first_token_counts_when_its_bytes_went_out() -> None:
    timeline = handed_over()
    timeline.first_sent_at = 15.0
    assert timeline.ttft_s == 5.0 == sum(known(timeline, *FIRST_TOKEN))
    assert timeline.handoff_gap_s == 2.5, "between tokens, wherever the bytes are"


def test_moments_are_in_order() -> None:
    timeline = handed_over()
    timeline.finished(20.0)
    assert timeline.moments() == {
        "received": 0.0,
        "dispatched": 1.0,
        "prefill_started": 2.0,
        "prefill_ended": 4.0,
        "kv_granted": 2.5,
        "first_kv_byte": 2.75,
        "last_kv_byte": 5.0,
        "committed": 5.5,
        "first_decode_step": 6.25,
        "first_token_delivered": 4.5,
        "second_token_delivered": 7.0,
        "finished": 10.0,
    }


def test_what_was_not_handed_over_has_no_hand_off() -> None:
    timeline = Timeline(arrived_at=0.0)
    timeline.dispatched("d", "d", 0, now=1.0)
    timeline.prompt_computed(0, 0.0, 1.0)
    timeline.tokens_delivered(0, now=2.0)
    timeline.tokens_delivered(1, now=3.0)
    assert known(timeline, "handoff_gap_s", "kv_transfer_s", *HANDOFF) == [None] * 6
    assert timeline.ttft_s == 2.0 == sum(known(timeline, *FIRST_TOKEN))


def test_a_first_token_that_was_overtaken_is_still_accounted_for() -> None:
    """The decode worker's row repeats the first token, and may come before it."""
    timeline = Timeline(arrived_at=0.0)
    timeline.dispatched("p", "d", 0, now=1.0)
    timeline.decode_began(0, BEGUN)
    timeline.tokens_delivered(1, now=5.0)
    timeline.prompt_computed(0, 1.0, 2.0)
    assert known(timeline, *FIRST_TOKEN) == [2.0, 2.0, 1.0]
    assert timeline.handoff_gap_s == 0.0


def test_parts_of_the_first_token_are_those_of_the_attempt_that_brought_it() -> None:
    timeline = Timeline(arrived_at=0.0)
    timeline.dispatched("p0", "d", 0, now=1.0)
    timeline.dispatched("p1", "d", 1, now=5.0)  # the first one died
    timeline.prompt_computed(1, 0.5, 2.0)
    timeline.tokens_delivered(0, now=8.0)
    assert known(timeline, *FIRST_TOKEN) == [5.5, 2.0, 0.5]
    assert timeline.ttft_s == 8.0


def test_a_gap_with_a_death_in_it_has_no_parts() -> None:
    """The second token came out of the prefill of the next attempt."""
    timeline = Timeline(arrived_at=0.0)
    timeline.dispatched("p0", "d0", 0, now=1.0)
    timeline.prompt_computed(0, 1.0, 1.0)
    timeline.tokens_delivered(0, now=3.5)
    timeline.handed_over(0, 1000, TIMES)
    timeline.dispatched("p1", "d1", 1, now=6.0)
    timeline.prompt_computed(1, 9.0, 9.0)
    timeline.tokens_delivered(1, now=30.0)
    timeline.handed_over(1, 1000, TIMES)
    timeline.decode_began(1, BEGUN)
    assert known(timeline, *FIRST_TOKEN) == [2.0, 1.0, 0.5], "of the first attempt"
    assert known(timeline, *HANDOFF) == [None] * 4
    assert timeline.handoff_gap_s == 26.5
    assert known(timeline, "prefill_worker_id", "decode_worker_id") == ["p1", "d1"]


def test_a_move_behind_the_second_token_changes_no_part() -> None:
    timeline = handed_over()
    before = known(timeline, *FIRST_TOKEN, *HANDOFF)
    timeline.dispatched("d2", "d2", 1, now=20.0)
    timeline.prompt_computed(1, 7.0, 7.0)
    timeline.tokens_delivered(9, now=40.0)
    assert known(timeline, *FIRST_TOKEN, *HANDOFF) == before


SECONDS = st.floats(0.0, 100.0)
EVENTS = st.one_of(
    st.tuples(st.just("dispatched"), st.sampled_from(["p0", "p1", "d"])),
    st.tuples(st.just("prompt_computed"), st.integers(0, 2), SECONDS, SECONDS),
    st.tuples(
        st.just("handed_over"),
        st.integers(0, 2),
        st.none() | st.builds(HandoffTimes, *[SECONDS] * 5),
    ),
    st.tuples(st.just("decode_began"), st.integers(0, 2), SECONDS, SECONDS),
    st.tuples(st.just("tokens_delivered"), st.integers(0, 3)),
    st.tuples(st.just("sent")),
    st.tuples(st.just("finished")),
)


@given(st.lists(st.tuples(st.floats(0.0, 10.0), EVENTS), max_size=20))
def test_nothing_is_negative_whatever_is_heard_and_when(
    history: list[tuple[float, tuple[Any, ...]]],
) -> None:
    """Also when a worker says that it took longer than there was time."""
    timeline, now, attempt = Timeline(arrived_at=1.0), 1.0, 0
    for seconds, event in history:
        now += seconds
        match event:
            case ("dispatched", worker_id):
                timeline.dispatched(worker_id, "d", attempt, now)
                attempt += 1
            case ("prompt_computed", of, queued_s, prefill_s):
                timeline.prompt_computed(of, queued_s, prefill_s)
            case ("handed_over", of, times):
                timeline.handed_over(of, 0 if times is None else 1, times)
            case ("decode_began", of, wait_s, step_s):
                timeline.decode_began(of, Begun("r", of, wait_s, step_s))
            case ("tokens_delivered", index):
                timeline.tokens_delivered(index, now)
            case ("sent",):
                if timeline.first_token_at is not None and timeline.first_sent_at is None:
                    timeline.first_sent_at = now
            case ("finished",):
                timeline.finished(now)
        check(timeline)


def check(timeline: Timeline) -> None:
    report = timeline.report()
    durations = [value for name, value in report.items() if name.endswith("_s")]
    for value in (*durations, *report["moments"].values()):
        assert value is None or (value >= 0.0 and math.isfinite(value))
    parts = [report[name] for name in FIRST_TOKEN]
    if report["ttft_s"] is not None and None not in parts:
        if report["delivery_s"] > 0.0:
            assert sum(parts) == pytest.approx(report["ttft_s"])
        else:
            assert sum(parts) >= report["ttft_s"] - 1e-9
