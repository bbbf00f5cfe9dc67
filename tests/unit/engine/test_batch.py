from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import pytest

from splitserve.engine.batch import Chunk, build_batch
from tests.unit.engine.sequences import row


class History(Sequence[int]):
    """Token i is 100 + i. It may be looked at in one place only, and refuses to be walked."""

    def __init__(self, length: int, start: int, end: int) -> None:
        self._length, self._start, self._end = length, start, end

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, int):
            assert self._start <= index < self._end
            return 100 + index
        assert (index.start, index.stop) == (self._start, self._end)
        return [100 + i for i in range(self._start, self._end)]

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a whole history was read")


def test_the_batch_of_the_drawing() -> None:
    a = Chunk(History(9, 0, 5), 0, 5, [7])
    b = Chunk(History(42, 41, 42), 41, 42, [3, 1, 5], (row([]),))
    c = Chunk(History(19, 16, 19), 16, 19, [2, 6, 9], (row([]), row([], 1)))
    batch = build_batch([a, b, c], block_size=16)
    assert batch.token_ids.tolist() == [100, 101, 102, 103, 104, 141, 116, 117, 118]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 41, 16, 17, 18]
    assert batch.slot_mapping.tolist() == [112, 113, 114, 115, 116, 5 * 16 + 9, 96, 97, 98]
    assert batch.query_starts.tolist() == [0, 5, 6, 9]
    assert batch.query_lens.tolist() == [5, 1, 3]
    assert batch.context_lens.tolist() == [5, 42, 19]
    assert batch.block_tables.tolist() == [[7, 7, 7], [3, 1, 5], [2, 6, 2]]
    assert batch.logits_rows.tolist() == [5, 8]
    assert batch.sample_rows is not None and batch.sample_rows.tolist() == [0, 1, 1]


def test_one_sample_each_needs_no_second_index() -> None:
    chunks = [Chunk([1, 2], 0, 2, [0], (row([1, 2]),)), Chunk([1], 0, 1, [1])]
    batch = build_batch(chunks, block_size=4)
    assert batch.sample_rows is None
    assert batch.logits_rows.tolist() == [1]


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk([1, 2, 3], 0, 4, [0]),  # behind the history
        Chunk([1, 2, 3], 2, 2, [0]),  # nothing to compute
        Chunk([1, 2, 3, 4, 5], 0, 5, [0]),  # five tokens in a block of four
    ],
)
def test_a_chunk_that_can_not_be_is_a_bug(chunk: Chunk) -> None:
    with pytest.raises(AssertionError):
        build_batch([chunk], block_size=4)


def test_an_empty_batch_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        build_batch([], block_size=4)
