"""Processes that die, are started again, are replaced, or outlive their coordinator."""

from __future__ import annotations

from typing import Any

from coordinator.events import Action, SendFailed, TimePassed
from coordinator.pools import MAX_STARTING
from splitserve.wire import messages as m
from tests.unit.coordinator.test_state_members import launched, states
from tests.unit.coordinator.world import EPOCH, LAUNCHER_HELLO, World, request, row, sent


def exit_of(world: World, launch_id: str, code: int = -9, lines: str = "") -> list[Action]:
    return world.hear("launcher", m.ProcessExited(launch_id, 7, code, lines))


def starts(actions: list[Action]) -> list[str]:
    return [message.launch_id for _, message in sent(actions, m.Start)]


def born(world: World, launch_id: str) -> list[Action]:
    role: Any = launch_id.partition("-")[0]
    return world.join(role, f"{launch_id}-x", launch_id)


def test_a_dead_worker_is_started_again_after_a_moment() -> None:
    world = launched(1, 1)
    assert starts(exit_of(world, "decode-0")) == []
    assert world.state.due() is not None
    assert starts(world.wait(0.4)) == []
    assert starts(world.wait(0.2)) == ["decode-1"]
    born(world, "decode-1")
    assert world.state.ready
    assert starts(world.wait(60.0)) == []


def test_one_that_is_declared_dead_is_killed_and_replaced() -> None:
    """A frozen process can't be asked; its place is taken all the same."""
    world = launched(1, 2)
    world.beat("decode-0-x", loop_age_s=61.0)
    actions = world.wait(0.0, beating=False)
    assert sent(actions, m.Stop) == [("launcher", m.Stop("decode-0", 0.0))]
    assert starts(world.wait(0.6)) == ["decode-2"]
    assert starts(exit_of(world, "decode-0")) == [], "it is replaced already"
    assert starts(world.wait(60.0)) == []


def test_the_wait_doubles_and_has_an_end() -> None:
    world = launched(1, 1)
    waits, launch_id = [], "decode-0"
    while True:
        exit_of(world, launch_id, 1, f"Traceback of {launch_id}")
        waited = 0.0
        started: list[str] = []
        while not started and waited < 30.0:
            started = starts(world.wait(0.5))
            waited += 0.5
        if not started:
            break
        (launch_id,) = started
        waits.append(waited)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0]
    (lineage,) = world.state.pools.failed
    assert (lineage.first_launch_id, lineage.num_failures) == ("decode-0", 6)
    assert lineage.given_up
    assert lineage.last_lines == "Traceback of decode-0", "the first failure says most"
    assert starts(world.state.scale(1, 1, world.now)) == ["decode-6"], "a person may try again"


def test_a_worker_that_was_scaled_away_is_not_started_again() -> None:
    world = launched(1, 2)
    world.state.scale(1, 1, world.now)
    exit_of(world, "decode-1", 0)
    assert starts(world.wait(60.0)) == []
    assert world.state.pools.failed == []


def test_a_restart_that_is_no_longer_wanted_is_dropped() -> None:
    world = launched(1, 2)
    exit_of(world, "decode-1")
    world.state.scale(1, 1, world.now)
    assert starts(world.wait(60.0)) == []


def test_a_worker_that_somebody_else_stops_is_replaced_while_it_drains() -> None:
    world = launched(1, 2)
    world.submit(request("a", max_tokens=9), request("b", max_tokens=9))
    world.beat("decode-0-x", draining=True)
    assert starts(world.wait(0.6)) == ["decode-2"]
    exit_of(world, "decode-0", 0)
    assert starts(world.wait(60.0)) == []


def test_a_process_that_never_says_hello_is_killed_and_replaced() -> None:
    """exo-explore/exo #1591: an instance that hung in its warm-up stayed so for ever."""
    world = launched(1, 2, start_timeout_s=30.0)
    exit_of(world, "decode-1")
    assert starts(world.wait(0.6)) == ["decode-2"]
    assert not sent(world.wait(29.0), m.Stop)
    actions = world.wait(1.1)
    assert sent(actions, m.Stop) == [("launcher", m.Stop("decode-2", 0.0))]
    assert starts(world.wait(1.1)) == ["decode-3"]


def test_a_replacement_that_never_says_hello_ends_the_rolling_restart() -> None:
    world = launched(1, 2, start_timeout_s=30.0)
    world.state.restart("decode", world.now)
    assert sent(world.wait(30.1), m.Stop) == [("launcher", m.Stop("decode-2", 0.0))]
    exit_of(world, "decode-2")
    assert starts(world.wait(60.0)) == []
    assert not any(w.to_be_replaced for w in world.state.registry.alive())


def test_one_that_is_declared_dead_before_all_are_ready_is_replaced() -> None:
    world = World(0, 0)
    world.state.pools.targets = {"prefill": 1, "decode": 1}
    world.hear("launcher", LAUNCHER_HELLO)
    born(world, "prefill-0")
    assert sent(world.wait(3.1, beating=False), m.Stop)
    due = world.state.due()
    assert due is not None and due > world.now, "the loop does not spin"
    assert starts(world.wait(0.6)) == ["prefill-1"]
    born(world, "prefill-1")
    born(world, "decode-0")
    assert world.state.ready


def test_one_that_nobody_can_kill_is_told_that_it_is_dead() -> None:
    """Started by hand: it would beat for ever, and never be heard."""
    world = World(1, 2)
    world.wait(3.1, beating=False)
    ((to, rejected),) = sent(world.beat("d0"), m.Reject)
    assert to == "d0" and "no heartbeat for 3 s" in rejected.reason


def test_being_stopped_by_hand_is_no_failure_however_often() -> None:
    world = launched(1, 1)
    for count in range(20):
        world.beat(f"decode-{count}-x", draining=True)
        assert starts(world.wait(0.6)) == [f"decode-{count + 1}"]
        born(world, f"decode-{count + 1}")
        exit_of(world, f"decode-{count}", 0)
    assert world.state.pools.failed == []


def test_a_restart_that_nobody_can_carry_out_does_not_keep_the_loop_turning() -> None:
    world = launched(1, 2)
    exit_of(world, "decode-0")
    world.handle(SendFailed(b"launcher", None, vanished=True))
    world.wait(1.0)
    due = world.state.due()
    assert due is not None and due > world.now, "the restart is late, but there is no launcher"


def test_however_many_are_dead_peers_hear_that_one_was_reaped() -> None:
    world = launched(1, 1)
    world.state.scale(1, 12, world.now)
    for number in range(1, 12):
        born(world, f"decode-{number}")
    for number in range(1, 12):
        world.handle(SendFailed(f"decode-{number}-x".encode(), None, vanished=True))
    told = sent(exit_of(world, "decode-1"), m.PeerGone)
    assert sorted(to for to, _ in told) == ["decode-0-x", "prefill-0-x"]
    assert told[0][1] == m.PeerGone("decode-1-x", EPOCH, reaped=True)
    assert sent(exit_of(world, "decode-1"), m.PeerGone) == []


def test_a_rolling_restart_starts_the_replacement_first() -> None:
    world = launched(1, 2)
    worker_ids, actions = world.state.restart("decode", world.now)
    assert sorted(worker_ids) == ["decode-0-x", "decode-1-x"]
    assert starts(actions) == ["decode-2"]
    assert not sent(world.wait(5.0), m.Drain), "nobody leaves before it is there"
    actions = born(world, "decode-2")
    assert [to for to, _ in sent(actions, m.Drain)] == ["decode-0-x"]
    assert starts(actions) == []
    actions = exit_of(world, "decode-0", 0)
    assert starts(actions) == ["decode-3"]
    born(world, "decode-3")
    assert starts(exit_of(world, "decode-1", 0)) == []
    assert states(world) == {
        "prefill-0-x": "ready",
        "decode-2-x": "ready",
        "decode-3-x": "ready",
    }
    assert starts(world.wait(60.0)) == []
    assert world.state.pools.failed == []


def test_a_rolling_restart_waits_for_the_streams_of_who_leaves() -> None:
    world = launched(1, 1)
    world.submit(request(max_tokens=9))
    world.first_token("prefill-0-x")
    world.handed_over("prefill-0-x")
    world.tokens("decode-0-x", row(0, 10, 11))
    world.state.restart("decode", world.now)
    assert not sent(born(world, "decode-1"), m.Drain)
    assert states(world)["decode-0-x"] == "draining"
    actions = world.tokens("decode-0-x", row(2, 12, finish="stop"))
    assert [to for to, _ in sent(actions, m.Drain)] == ["decode-0-x"]


def test_a_replacement_that_dies_ends_the_rolling_restart() -> None:
    """The old worker goes on: a bad version must not take the pool down one by one."""
    world = launched(1, 2)
    world.state.restart("decode", world.now)
    exit_of(world, "decode-2", 1, "no such option")
    assert starts(world.wait(60.0)) == []
    assert states(world)["decode-0-x"] == "ready" and states(world)["decode-1-x"] == "ready"


# -- a coordinator that follows another ----------------------------------------------------------


def test_who_was_told_to_stop_by_hand_is_not_told_twice() -> None:
    """A second SIGTERM ends a worker at once, in the middle of what it does."""
    world = launched(1, 2)
    actions = world.beat("decode-0-x", draining=True)
    assert sent(actions, m.Drain) and not sent(actions, m.Stop)


def test_the_launcher_hears_that_the_coordinator_lives() -> None:
    world = launched(1, 1)
    beat = m.Heartbeat("launcher", EPOCH, 0.0, m.WorkerStats())
    assert sent(world.hear("launcher", beat), m.HeartbeatAck) == [
        ("launcher", m.HeartbeatAck(EPOCH))
    ]


def test_those_given_up_are_not_started_again_however_many_they_are() -> None:
    world = launched(1, 12, max_restarts=0)
    for i in range(12):
        exit_of(world, f"decode-{i}", 1)
    assert starts(world.wait(600.0)) == []


def test_only_so_many_start_at_once_and_the_rest_can_be_taken_back() -> None:
    world = launched(1, 1)
    actions = world.state.scale(1, 500, world.now)
    assert len(starts(actions)) == MAX_STARTING
    assert len(starts(born(world, "decode-1"))) == 1
    actions = world.state.scale(1, 2, world.now)
    assert len(sent(actions, m.Stop)) == MAX_STARTING
    assert starts(world.wait(1.0)) == []


def test_who_was_scaled_away_stays_when_the_others_die() -> None:
    """Its streams keep it for a while, and it can do what nobody else can."""
    world = launched(1, 2)
    world.submit(request("a", max_tokens=9), request("b", max_tokens=9))
    world.state.scale(1, 1, world.now)
    assert states(world)["decode-1-x"] == "draining"
    exit_of(world, "decode-0")
    assert states(world)["decode-1-x"] == "ready"
    assert starts(world.wait(60.0)) == []


def test_a_pause_of_everybody_is_nobodys_death() -> None:
    """A paused machine or container: who woke first killed all others."""
    world = launched(1, 2)
    world.now += 4.0
    world.handle(TimePassed(paused_s=4.0))
    assert set(states(world).values()) == {"ready"}
    world.wait(3.1, beating=False)
    assert set(states(world).values()) == {"dead"}, "silence afterwards is silence"
