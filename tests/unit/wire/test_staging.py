from __future__ import annotations

from splitserve.wire.staging import Staging


def test_the_budget_is_per_peer() -> None:
    staging = Staging(100)
    assert staging.add("a", 60) and staging.add("a", 40)
    assert not staging.add("a", 1)
    assert staging.add("b", 100)
    assert (staging.staged_bytes("a"), staging.staged_bytes("b")) == (100, 100)


def test_a_buffer_larger_than_the_budget_goes_alone() -> None:
    staging = Staging(100)
    assert staging.add("a", 500)
    assert not staging.add("a", 1)
    assert staging.remove("a", 500)
    assert staging.staged_bytes("a") == 0


def test_room_is_announced_once_on_the_way_down_through_half() -> None:
    staging = Staging(100)
    for _ in range(4):
        staging.add("a", 25)
    assert [staging.remove("a", 25) for _ in range(4)] == [False, True, False, False]


def test_no_room_is_announced_when_half_was_never_passed() -> None:
    staging = Staging(100)
    staging.add("a", 50)
    assert not staging.remove("a", 50)


def test_messages_without_buffers_are_not_counted() -> None:
    staging = Staging(100)
    staging.add("a", 100)
    assert staging.add("a", 0)
    assert not staging.remove("a", 0)
