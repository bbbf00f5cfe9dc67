from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from coordinator.token_order import TokenOrder
from splitserve.request import TokenLogprobs
from splitserve.wire.messages import TokenRow
from tests.unit.coordinator.world import row


def ids(order: TokenOrder, given_row: TokenRow) -> list[int]:
    return [token.token_id for token in order.take(given_row).tokens]


@given(st.integers(1, 12), st.randoms(use_true_random=False), st.data())
def test_every_index_once_whatever_the_order(
    num_tokens: int, shuffler: random.Random, data: st.DataObject
) -> None:
    rows = []
    start = 0
    while start < num_tokens:
        end = data.draw(st.integers(start + 1, num_tokens))
        finish = "length" if end == num_tokens else None
        first = max(0, start - data.draw(st.integers(0, 2)))  # repeats what came before
        rows.append(row(first, *range(first, end), finish=finish))
        start = end
    shuffler.shuffle(rows)
    order = TokenOrder(max_tokens=num_tokens)
    taken = [order.take(one) for one in [*rows, *rows]]
    assert [t.token_id for one in taken for t in one.tokens] == list(range(num_tokens))
    assert [one.finish for one in taken if one.finish] == ["length"]
    assert order.finished


def test_what_was_delivered_is_never_changed() -> None:
    order = TokenOrder(max_tokens=8)
    assert ids(order, row(0, 1, 2)) == [1, 2]
    assert ids(order, row(0, 9, 9, 3)) == [3]


def test_the_first_that_comes_for_an_index_stays() -> None:
    order = TokenOrder(max_tokens=8)
    assert ids(order, row(1, 2)) == []
    assert ids(order, row(1, 9)) == []
    assert ids(order, row(0, 1)) == [1, 2]


def test_tokens_past_the_end_are_dropped() -> None:
    order = TokenOrder(max_tokens=2)
    assert ids(order, row(0, 1, 2, 3, 4)) == [1, 2]
    order = TokenOrder(max_tokens=8)
    assert ids(order, row(2, 9)) == []
    assert ids(order, row(0, 1, 2, finish="stop")) == [1, 2]
    assert order.finished
    assert ids(order, row(2, 3)) == []


def test_the_finish_comes_with_the_last_token() -> None:
    order = TokenOrder(max_tokens=8)
    assert order.take(row(1, 2, finish="stop")).finish is None
    assert not order.finished
    assert order.take(row(0, 1)).finish == "stop"


def test_logprobs_stay_with_their_tokens() -> None:
    order = TokenOrder(max_tokens=8)
    entries = (TokenLogprobs(-0.5), TokenLogprobs(-1.5))
    taken = order.take(TokenRow("r", 0, 0, 0, (7, 8), entries))
    assert [(t.token_id, t.logprobs) for t in taken.tokens] == [(7, entries[0]), (8, entries[1])]
