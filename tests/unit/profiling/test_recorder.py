"""The stopwatch of a worker's loop, on a clock of our own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.profiling.evidence import PHASES, Phase, SlotLimit
from splitserve.profiling.recorder import WINDOW_S, Recorder, Step, full_batch_gains
from splitserve.profiling.step_log import StepLog
from splitserve.work import Ceilings, StepSpent, StepWork

CEILINGS = Ceilings(bytes_per_s=100.0, flops_per_s=1000.0)
WEIGHTS = 50


class World:
    """A clock that stands still unless it is told otherwise, and a recorder on it."""

    def __init__(self) -> None:
        self.now = 7.0
        self.recorder = Recorder(CEILINGS, WEIGHTS, lambda: self.now)

    def lap(self, phase: Phase, seconds: float) -> None:
        self.now += seconds
        self.recorder.lap(phase)

    def step(self, forward_s: float, used: int = 1, allowed: int = 1, rest_s: float = 0.0) -> None:
        self.now += forward_s + rest_s
        spent = StepSpent(forward_s=forward_s, work=StepWork(num_bytes=60, num_flops=100))
        limit: SlotLimit = "cap" if used == allowed else "no_request"
        self.recorder.stepped(Step(3, 2, used, allowed, limit, 4), spent)


@pytest.fixture
def world() -> World:
    return World()


def test_a_step_is_a_row_with_all_that_came_before_it(world: World) -> None:
    world.lap("wait", 0.25)
    world.lap("receive", 0.125)
    world.recorder.turned()  # nothing was computed: no row yet
    world.lap("schedule", 0.125)
    world.step(0.5, rest_s=0.0625)
    world.lap("send", 0.03125)
    world.recorder.turned()
    rows = world.recorder.log.since(0)
    assert len(rows) == 1
    row = {name: rows[name][0] for name in rows.dtype.names or ()}
    assert (row["wait_s"], row["receive_s"], row["schedule_s"]) == (0.25, 0.125, 0.125)
    assert (row["other_s"], row["forward_s"], row["send_s"]) == (0.0625, 0.5, 0.03125)
    assert (row["num_prefill_tokens"], row["num_decode_tokens"], row["num_bytes"]) == (3, 2, 60)
    assert row["ended_at"] == world.now
    assert sum(row[f"{phase}_s"] for phase in PHASES) == world.now - 7.0


def test_a_window_closes_with_the_turn_that_makes_it_a_second(world: World) -> None:
    world.step(0.625)
    world.recorder.turned()
    assert world.recorder.evidence is None
    world.step(0.75)
    world.recorder.turned()
    evidence = world.recorder.evidence
    assert evidence is not None
    assert (evidence.window, evidence.window_s, evidence.num_steps) == (1, 1.375, 2)
    assert (evidence.forward_s, evidence.cap_s, evidence.other_s) == (1.375, 1.375, 0.0)
    assert (evidence.num_bytes, evidence.num_flops) == (120, 200)
    assert evidence.memory_floor_s == pytest.approx(1.2)  # the two floors of a step differ
    assert evidence.compute_floor_s == pytest.approx(0.2)
    assert evidence.floor_s == pytest.approx(1.2)
    assert evidence.bottleneck == "memory"


def test_who_is_above_a_roof_lifts_it_and_is_never_above_100_percent() -> None:
    """Roofs of a machine that was busy when it was measured are too low."""
    world, kept = World(), list[Ceilings]()
    world.recorder = Recorder(CEILINGS, WEIGHTS, lambda: world.now, kept.append)
    for _ in range(4):
        world.step(0.25)
        world.recorder.turned()
    evidence = world.recorder.evidence
    assert evidence is not None
    assert kept == [world.recorder.ceilings] == [Ceilings(200.0, 1000.0)], "what weights moved"
    assert evidence.efficiency == 1.0
    assert (evidence.memory_floor_s, evidence.compute_floor_s) == (1.0, 0.4)
    assert evidence.bottleneck == "memory"
    world.step(0.25)
    world.lap("wait", 0.75)
    world.recorder.turned()
    assert world.recorder.evidence is not None and world.recorder.evidence.efficiency == 1.0
    assert len(kept) == 1


def test_kv_that_sequences_share_lifts_no_roof() -> None:
    """Counted once for each, it is read from a cache: more bytes than memory can move."""
    world, kept = World(), list[Ceilings]()
    world.recorder = Recorder(CEILINGS, WEIGHTS, lambda: world.now, kept.append)
    for num_bytes, efficiency in ((WEIGHTS + 500, 1.0), (WEIGHTS, 0.5)):
        world.now += 1.0
        spent = StepSpent(forward_s=1.0, work=StepWork(num_bytes, 100))
        world.recorder.stepped(Step(0, 10, 10, 10, "cap", 40), spent)
        world.recorder.turned()
        evidence = world.recorder.evidence
        assert evidence is not None and evidence.efficiency == efficiency
        assert evidence.bottleneck == "memory"
    assert kept == [] and world.recorder.ceilings == CEILINGS


def test_steps_of_two_kinds_are_no_more_than_100_percent_together() -> None:
    """Neither rate is above its roof over the whole window, only the floors of both are."""
    world, kept = World(), list[Ceilings]()
    world.recorder = Recorder(CEILINGS, WEIGHTS, lambda: world.now, kept.append)
    for work in (StepWork(num_bytes=60), StepWork(num_flops=600)):
        world.now += 0.5
        step = Step(1, 0, 1, 1, "cap", 0)
        world.recorder.stepped(step, StepSpent(forward_s=0.5, work=work))
        world.recorder.turned()
    evidence = world.recorder.evidence
    assert evidence is not None and evidence.efficiency == 1.0
    assert (evidence.memory_floor_s, evidence.compute_floor_s) == (0.6, 0.6)
    assert kept == []


def test_the_next_window_begins_where_the_last_one_ended(world: World) -> None:
    world.lap("wait", 1.5)
    world.recorder.turned()
    world.lap("receive", 1.25)
    world.recorder.turned()
    evidence = world.recorder.evidence
    assert evidence is not None
    assert (evidence.window, evidence.window_s) == (2, 1.25)
    assert (evidence.wait_s, evidence.receive_s) == (0.0, 1.25)


def test_who_waits_for_nothing_new_is_left_alone(world: World) -> None:
    assert world.recorder.due("wait") == 7.0 + WINDOW_S
    world.lap("wait", 1.0)
    world.recorder.turned()
    assert world.recorder.evidence is not None
    assert world.recorder.evidence.bottleneck == "idle"
    assert world.recorder.due("wait") == float("inf")
    assert world.recorder.due("kv_wait") == world.now + WINDOW_S  # that would be news
    world.step(0.01)
    world.recorder.turned()
    assert world.recorder.due("wait") < float("inf")  # a window with a step is to be closed


@given(
    st.lists(
        st.tuples(st.sampled_from(PHASES), st.floats(0, 2), st.booleans()),
        max_size=40,
    )
)
def test_phases_add_up_to_wall_time(laps: list[tuple[Phase, float, bool]]) -> None:
    world = World()
    total_s = windows_s = 0.0
    for phase, seconds, is_step in laps:
        if is_step:
            world.step(seconds)
        else:
            world.lap(phase, seconds)
        number = world.recorder.evidence.window if world.recorder.evidence else 0
        world.recorder.turned()
        evidence = world.recorder.evidence
        if evidence is not None and evidence.window > number:
            waits_s = evidence.wait_s + evidence.kv_wait_s
            assert waits_s + evidence.busy_s == pytest.approx(evidence.window_s)
            windows_s += evidence.window_s
            total_s = world.now - 7.0
    assert windows_s == pytest.approx(total_s)


def gain(used: int, allowed: int, num_bytes: int, num_flops: int) -> float:
    log = StepLog(1)
    log.append((0.0, *[0.0] * len(PHASES), 0, used, used, allowed, 1, 0, num_bytes, num_flops))
    return float(full_batch_gains(log.since(0), CEILINGS, WEIGHTS)[0])


def test_a_full_batch_reads_its_weights_once() -> None:
    assert gain(1, 4, num_bytes=WEIGHTS, num_flops=1) == pytest.approx(4.0)
    # 50 of weights and 10 of KV against 50 and 40: four times the tokens in 1.5 times the time
    assert gain(1, 4, num_bytes=60, num_flops=1) == pytest.approx(4 * 60 / 90)


def test_a_batch_that_is_bound_by_flops_gains_nothing() -> None:
    assert gain(1, 4, num_bytes=60, num_flops=10_000) == pytest.approx(1.0)


def test_a_full_batch_gains_nothing() -> None:
    assert gain(4, 4, num_bytes=60, num_flops=1) == 1.0


def filled(capacity: int, num_rows: int) -> StepLog:
    log = StepLog(capacity)
    for number in range(num_rows):
        log.append((float(number), *[0.0] * len(PHASES), 0, 0, 0, 0, 0, 0, 0, 0))
    return log


@pytest.mark.parametrize("num_rows", [0, 3, 4, 5, 11])
def test_the_log_keeps_the_last_rows(num_rows: int) -> None:
    kept = filled(4, num_rows).since(0)["ended_at"].tolist()
    assert kept == list(range(num_rows))[-4:]


def test_the_log_tells_what_is_new() -> None:
    log = filled(4, 6)
    assert log.since(4)["ended_at"].tolist() == [4.0, 5.0]
    assert log.since(6)["ended_at"].tolist() == []
