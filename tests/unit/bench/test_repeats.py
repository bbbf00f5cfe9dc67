from __future__ import annotations

import pytest

from splitserve.bench.repeats import paired_ratios, spread_of, spreads


def test_a_number_over_repeats() -> None:
    spread = spread_of([3.0, 1.0, 2.0])
    assert (spread.median, spread.low, spread.high, spread.num_values) == (2.0, 1.0, 3.0, 3)
    assert str(spread) == "2.00 (1.00..3.00)"
    assert [str(spread_of([value])) for value in (0.25, 12.345, 123.4)] == ["0.25", "12.3", "123"]


def test_a_number_that_some_repeats_lack_is_of_the_others() -> None:
    found = spreads([{"a": 1.0}, {"a": 3.0, "b": 5.0}])
    assert (found["a"].median, found["b"].median, found["b"].num_values) == (2.0, 5.0, 1)


def test_ratios_are_of_pairs_not_of_medians() -> None:
    firsts = [{"rate": 10.0}, {"rate": 20.0}, {"rate": 40.0}]
    others = [{"rate": 20.0}, {"rate": 10.0}, {"rate": 44.0}]
    ratio = paired_ratios(firsts, others)["rate"]
    assert (ratio.low, ratio.high) == (0.5, 2.0)
    assert ratio.median == pytest.approx(1.1)


def test_a_repeat_without_one_of_the_two_is_no_pair() -> None:
    firsts = [{"rate": 10.0, "late": 0.0}, None, {"rate": 10.0}]
    others = [{"rate": 20.0, "late": 1.0}, {"rate": 90.0}, None]
    ratios = paired_ratios(firsts, others)
    assert list(ratios) == ["rate"]
    assert (ratios["rate"].median, ratios["rate"].num_values) == (2.0, 1)
