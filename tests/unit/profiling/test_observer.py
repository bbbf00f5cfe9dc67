"""What an observed worker tells, report by report."""

from __future__ import annotations

import pytest

from splitserve.profiling import observer
from splitserve.profiling.observer import MAX_KERNELS, REPORT_EVERY_S, Observer
from splitserve.profiling.recorder import Recorder, Step
from splitserve.wire import messages as m
from splitserve.work import Ceilings, Operation, StepSpent

EPOCH = "e"


class World:
    """A worker that computes when it is told to, and a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.recorder = Recorder(Ceilings(1e9, 1e9), 0, lambda: self.now)
        self.asked_for: list[int] = []  # steps to trace
        self.operations: list[Operation] = []
        self.num_left_out = 0
        self.observer = Observer("w", self.recorder, self)

    def trace_next(self, num_steps: int) -> None:
        self.asked_for.append(num_steps)

    def take_kernels(self) -> tuple[list[Operation], int]:
        taken = self.operations, self.num_left_out
        self.operations, self.num_left_out = [], 0
        return taken

    def begin(self, duration_s: float = 10.0, num_kernel_steps: int = 0) -> None:
        self.observer.begin(m.Observe(EPOCH, duration_s, num_kernel_steps), self.now)

    def step(self) -> None:
        self.recorder.stepped(Step(0, 1, 1, 1, "cap", 1), StepSpent())
        self.recorder.turned()

    def turn(self, after_s: float = 0.0) -> list[m.Observed]:
        self.now += after_s
        return self.observer.turned(self.now)


@pytest.fixture
def world() -> World:
    return World()


def test_rows_are_told_from_the_beginning_to_the_end(world: World) -> None:
    world.step()
    assert world.turn() == [] and world.observer.due() == float("inf")
    world.begin(duration_s=1.0)
    world.step()
    assert world.turn() == [] and world.observer.due() == world.now + REPORT_EVERY_S
    (report,) = world.turn(REPORT_EVERY_S)
    assert [row[0] for row in report.rows] == [REPORT_EVERY_S], "ended_at is an age"
    world.step()
    (last,) = world.turn(0.5)
    assert len(last.rows) == 1
    world.step()
    assert world.turn(REPORT_EVERY_S) == [] and world.observer.due() == float("inf")


def test_kernels_are_asked_for_only_where_they_are_wanted(world: World) -> None:
    world.begin()
    assert world.asked_for == []
    world.begin(num_kernel_steps=3)
    assert world.asked_for == [3]
    world.turn(10.0)
    assert world.asked_for == [3, 0], "steps that never came are not watched later"


def test_kernels_go_in_reports_of_a_bounded_size_one_a_turn(world: World) -> None:
    world.begin(num_kernel_steps=1)
    number = 2 * MAX_KERNELS + 1
    world.operations = [Operation(f"{n}" + "x" * 500, world.now + 1, 0.25) for n in range(number)]
    told: list[m.KernelEvent] = []
    for left in (MAX_KERNELS + 1, 1, 0):
        (report,) = world.turn(2.0 if not told else 0.0)
        told += report.kernels
        assert len(told) == number - left
        assert world.observer.due() == (0.0 if left else world.now + REPORT_EVERY_S)
    assert world.turn() == []
    assert all(len(event.name) == 200 for event in told)
    assert [event.name.partition("x")[0] for event in told] == [str(n) for n in range(number)]
    assert {(event.age_s, event.duration_s) for event in told} == {(1.0, 0.25)}


def test_the_end_waits_for_kernels_that_are_here(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "MAX_KERNELS", 1)
    world.begin(duration_s=1.0, num_kernel_steps=1)
    world.operations = [Operation(str(n), world.now, 0.1) for n in range(3)]
    names = [event.name for _ in range(5) for one in world.turn(1.0) for event in one.kernels]
    assert names == ["0", "1", "2"]
    assert world.observer.due() == float("inf")


def test_what_there_was_no_room_for_is_counted_once(world: World) -> None:
    world.begin(num_kernel_steps=1)
    world.operations, world.num_left_out = [Operation("a", world.now, 0.1)], 7
    (report,) = world.turn()
    assert report.num_lost == 7
    world.step()
    (report,) = world.turn(REPORT_EVERY_S)
    assert report.num_lost == 0


def test_kernels_of_an_earlier_time_are_not_told(world: World) -> None:
    world.operations = [Operation("old", world.now, 0.1)]
    world.begin(num_kernel_steps=1)
    assert world.turn(REPORT_EVERY_S) == []


def test_a_window_from_before_is_not_told(world: World) -> None:
    """An idle worker's is as long as it was idle: it would outweigh everything that is observed."""
    world.now += 3600
    world.begin()
    world.recorder.lap("wait")
    world.recorder.turned()
    assert world.recorder.evidence is not None and world.recorder.evidence.window_s == 3600
    assert world.turn(REPORT_EVERY_S) == []
    world.now += 1
    world.recorder.lap("wait")
    world.recorder.turned()
    (report,) = world.turn()
    assert [w.evidence.window_s for w in report.windows] == [1 + REPORT_EVERY_S]


def test_no_time_at_all_ends_it(world: World) -> None:
    world.begin(num_kernel_steps=2)
    world.step()
    world.begin(duration_s=0.0)
    assert world.observer.due() == float("inf")
    assert world.turn(REPORT_EVERY_S) == []
    assert world.asked_for == [2, 0]
