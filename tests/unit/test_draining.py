import pytest

from splitserve.draining import DRAIN_MARGIN_S, Draining


def test_nobody_leaves_unasked() -> None:
    assert not Draining().over(idle=True, connected=False, now=1e9)


def test_a_signalled_worker_waits_for_the_word_that_nothing_more_comes() -> None:
    draining = Draining()
    draining.signalled(1.0)
    assert draining.started
    assert not draining.over(idle=True, connected=True, now=2.0)
    draining.told(30.0, now=3.0)
    assert not draining.over(idle=False, connected=True, now=4.0)
    assert draining.over(idle=True, connected=True, now=4.0)
    assert draining.over(idle=False, connected=True, now=33.0)


@pytest.mark.parametrize("idle", [True, False])
def test_without_a_word_there_is_a_limit_of_its_own(idle: bool) -> None:
    draining = Draining(grace_s=8.0)
    draining.signalled(1.0)
    draining.signalled(50.0)  # counts from the first
    assert not draining.over(idle, connected=True, now=8.9 + DRAIN_MARGIN_S)
    assert draining.over(idle, connected=True, now=9.0 + DRAIN_MARGIN_S)


def test_without_a_coordinator_nobody_waits_for_what_is_here() -> None:
    draining = Draining()
    draining.signalled(1.0)
    assert draining.over(idle=False, connected=False, now=1.0)


def test_a_drain_without_time_is_now() -> None:
    draining = Draining()
    draining.told(0.0, now=5.0)
    assert draining.over(idle=False, connected=True, now=5.0)
