"""How a request that was handed over comes to its first step, as its decode worker tells it."""

from __future__ import annotations

import pytest

from decode_worker import incoming as i
from decode_worker.answers import Answers
from decode_worker.scheduler import DecodeScheduler
from splitserve.request import SampledToken
from splitserve.scheduling.block_manager import BlockManager
from splitserve.wire import messages as m
from tests.unit.decode_worker.test_reception import NoCopies
from tests.unit.requests import LAYOUT, make_request


class Step:
    """A decode worker's answers, and a clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.blocks = BlockManager(32)
        self.scheduler = DecodeScheduler(self.blocks, LAYOUT.block_size, 64)
        self.answers = Answers(self.scheduler, NoCopies(), LAYOUT.block_size, lambda: self.now)

    def begin(self, name: str, whole_at: float, n: int = 1) -> None:
        request = make_request(name, 8, n=n)
        rows = tuple(m.TokenRow(name, 0, choice, 0, (5,)) for choice in range(n))
        block_ids = self.blocks.allocate(2 + n)
        assert block_ids is not None
        nothing = self.scheduler.cache.match(request.token_ids, 0)
        self.answers.begin(i.Begin(request, rows, 1, whole_at, nothing), block_ids)

    def run(self, seconds: float) -> m.Tokens:
        """A step of everything."""
        plan = self.scheduler.schedule()
        for planned in plan:
            self.answers.prompts.started(planned.sequence.request.key, self.now)
        self.now += seconds
        self.scheduler.computed(plan)
        for planned in plan:
            self.answers.take(planned, (SampledToken(7),))
        tokens = self.answers.tokens("epoch")
        self.answers.rows.clear()
        return tokens


@pytest.mark.parametrize("n", [1, 3])
def test_the_first_step_is_told_once(n: int) -> None:
    step = Step()
    step.begin("a", whole_at=2.0, n=n)
    step.now = 5.0  # another step ran until then
    tokens = step.run(1.5)
    assert tokens.begun == (m.Begun("a", 0, 3.0, 1.5),)
    assert len(tokens.rows) == n
    assert step.run(1.0).begun == ()
    assert not step.answers.prompts


def test_who_joins_later_has_a_first_step_of_its_own() -> None:
    step = Step()
    step.begin("a", whole_at=0.0)
    step.run(1.0)
    step.begin("b", whole_at=0.25)
    assert step.run(2.0).begun == (m.Begun("b", 0, 0.75, 2.0),)
