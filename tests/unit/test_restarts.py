from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from splitserve.restarts import RestartPolicy


def test_the_wait_doubles_up_to_its_limit_and_then_there_is_none() -> None:
    policy = RestartPolicy(max_restarts=7)
    assert [policy.next_delay(float(i)) for i in range(8)] == [0.5, 1, 2, 4, 8, 10, 10, None]
    assert policy.num_recent == 8


def test_five_in_five_minutes_unless_told_otherwise() -> None:
    policy = RestartPolicy()
    waits = [policy.next_delay(50.0 * i) for i in range(6)]
    assert waits == [0.5, 1, 2, 4, 8, None]
    policy = RestartPolicy()
    waits = [policy.next_delay(60.0 * i) for i in range(6)]  # the sixth is 300 s after the first
    assert None not in waits


def test_a_quiet_window_makes_the_wait_short_again() -> None:
    policy = RestartPolicy(window_s=10)
    assert [policy.next_delay(now) for now in (0, 1, 2)] == [0.5, 1, 2]
    assert policy.next_delay(11.9) == 4
    assert policy.next_delay(22.0) == 0.5
    assert policy.num_recent == 1


def test_none_are_allowed() -> None:
    assert RestartPolicy(max_restarts=0).next_delay(0) is None


@given(st.lists(st.floats(0, 100), max_size=60), st.integers(0, 5))
def test_no_window_ever_has_more_restarts_than_allowed(gaps: list[float], limit: int) -> None:
    policy, now, restarts = RestartPolicy(max_restarts=limit, window_s=100), 0.0, []
    for gap in gaps:
        now += gap
        delay = policy.next_delay(now)
        if delay is not None:
            assert 0.5 <= delay <= 10
            restarts.append(now)
    for end in restarts:
        assert sum(0 <= end - moment < 100 for moment in restarts) <= limit
