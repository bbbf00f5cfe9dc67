from decode_worker.tombstones import Tombstones
from splitserve.scheduling.sequence import RequestKey


def key(name: str = "a", attempt: int = 0) -> RequestKey:
    return RequestKey(name, attempt)


def test_a_burial_covers_this_attempt_and_those_before_it_until_its_time() -> None:
    tombstones = Tombstones()
    tombstones.bury(key(attempt=2), until=10.0, now=0.0)
    assert [tombstones.cover(key(attempt=n), 9.9) for n in range(4)] == [True, True, True, False]
    assert not tombstones.cover(key("b"), 9.9)
    assert not tombstones.cover(key(), 10.0)


def test_a_later_burial_never_takes_anything_back() -> None:
    tombstones = Tombstones()
    tombstones.bury(key(attempt=5), until=10.0, now=0.0)
    tombstones.bury(key(attempt=1), until=5.0, now=1.0)
    assert tombstones.cover(key(attempt=5), 9.0)


def test_what_is_past_is_dropped() -> None:
    tombstones = Tombstones()
    for number in range(10):
        tombstones.bury(key(str(number)), until=number + 1.0, now=float(number))
    assert len(tombstones) == 1


def test_there_are_never_too_many_and_the_oldest_go_first() -> None:
    tombstones = Tombstones(max_tombstones=3)
    for name in "abc":
        tombstones.bury(key(name), until=100.0, now=0.0)
    tombstones.bury(key("a"), until=100.0, now=1.0)
    tombstones.bury(key("d"), until=100.0, now=2.0)
    assert [tombstones.cover(key(name), 3.0) for name in "abcd"] == [True, False, True, True]
