"""The life of processes: joining, dying, scaling, and what the launcher is told."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from coordinator.events import Action, Fail, HttpOpened, Send, SendFailed
from splitserve.errors import InvalidRequestError, UnavailableError
from splitserve.wire import messages as m
from tests.unit.coordinator.world import (
    BASE_URL,
    EPOCH,
    LAUNCHER,
    LAUNCHER_HELLO,
    World,
    delivered,
    hello,
    of,
    released,
    request,
    row,
    sent,
)


def launched(num_prefill: int = 1, num_decode: int = 1, **options: Any) -> World:
    """A cluster brought up by a launcher."""
    world = World(0, 0, **options)
    world.state.pools.targets = {"prefill": num_prefill, "decode": num_decode}
    world.hear("launcher", LAUNCHER_HELLO)
    for launch in list(world.state.pools.launches.values()):
        world.join(launch.role, f"{launch.launch_id}-x", launch.launch_id)
    world.handle(HttpOpened(BASE_URL))
    return world


def states(world: World) -> dict[str, str]:
    return {w.worker_id: w.state for w in world.state.registry.workers.values()}


def test_a_worker_is_welcomed_with_the_epoch() -> None:
    world = World(1, 1)
    assert world.join("decode", "d9") == [Send(b"d9", m.Welcome(EPOCH))]


def test_the_launcher_starts_what_is_missing_and_hears_when_all_is_ready() -> None:
    world = World(0, 0)
    world.state.pools.targets = {"prefill": 1, "decode": 2}
    assert world.hear("launcher", LAUNCHER_HELLO) == [
        Send(LAUNCHER, m.Welcome(EPOCH)),
        Send(LAUNCHER, m.Targets(1, 2)),
        Send(LAUNCHER, m.Start("prefill-0", "prefill")),
        Send(LAUNCHER, m.Start("decode-0", "decode")),
        Send(LAUNCHER, m.Start("decode-1", "decode")),
    ]
    with pytest.raises(UnavailableError, match="0 of 1 prefill and 0 of 2 decode"):
        world.state.limits()
    world.join("decode", "a", "decode-0")
    world.join("prefill", "b", "prefill-0")
    world.handle(HttpOpened(BASE_URL))
    assert not world.state.ready
    actions = world.join("decode", "c", "decode-1")
    assert sent(actions, m.Ready) == [("launcher", m.Ready(EPOCH, BASE_URL, world.state.limits()))]
    assert world.state.ready
    assert world.state.limits().max_total_tokens == 512
    assert not sent(world.join("decode", "d"), m.Ready), "it is said once"


def test_another_launcher_is_told_again_and_starts_only_what_never_came() -> None:
    world = launched(1, 2)
    world.state.scale(1, 3, world.now)  # decode-2, which will never say Hello
    world.handle(SendFailed(LAUNCHER, None, vanished=True))
    actions = world.hear("launcher2", LAUNCHER_HELLO)
    assert [message.launch_id for _, message in sent(actions, m.Start)] == ["decode-3"]
    assert sent(actions, m.Ready) == [("launcher2", m.Ready(EPOCH, BASE_URL, world.state.limits()))]


def test_a_second_launcher_is_rejected_and_told_nothing() -> None:
    world = launched(1, 1)
    (send,) = of(world.hear("rogue", LAUNCHER_HELLO), Send)
    assert send.identity == b"rogue" and isinstance(send.message, m.Reject)
    actions = world.state.scale(1, 2, world.now)
    assert [to for to, _ in sent(actions, m.Start)] == ["launcher"]


@pytest.mark.parametrize("sender", ["rogue", "decode-0-x", "prefill-0-x"])
def test_only_the_launcher_is_believed_about_exits(sender: str) -> None:
    world = launched(1, 1)
    world.submit(request())
    assert world.hear(sender, m.ProcessExited("decode-0", 7, -9, "")) == []
    assert states(world) == {"decode-0-x": "ready", "prefill-0-x": "ready"}
    assert "decode-0" in world.state.pools.launches
    world.hear("launcher", m.ProcessExited("decode-0", 7, -9, ""))
    assert states(world)["decode-0-x"] == "dead"


@pytest.mark.parametrize("kind", ["silence", "a stuck loop", "exit", "gone connection"])
def test_a_prompt_outlives_its_decode_worker(kind: str) -> None:
    """Its KV is kept, and goes to another one."""
    world = launched(1, 1)
    world.join("decode", "survivor")
    ((_, prefill),) = sent(world.submit(request()), m.Prefill)
    victim = str(prefill.decode_worker_id)
    (other,) = {"survivor", "decode-0-x"} - {victim}
    launch_id = world.state.registry.workers[victim].launch_id
    actions = kill(world, victim, launch_id, kind)
    assert not of(actions, Fail) and released(actions) == []
    endpoint = f"tcp://{other}:1"
    retarget = m.Retarget("r", 1, EPOCH, other, endpoint)
    assert sent(actions, m.Retarget) == [("prefill-0-x", retarget)]
    assert states(world)[victim] == "dead"
    if kind != "exit" and launch_id in world.state.pools.launches:
        assert sent(actions, m.Stop) == [("launcher", m.Stop(launch_id, 0.0))]
    gone = m.PeerGone(victim, EPOCH, kind == "exit")
    assert (other, gone) in sent(actions, m.PeerGone)
    assert ("prefill-0-x", gone) in sent(actions, m.PeerGone)


def kill(world: World, victim: str, launch_id: str, kind: str) -> list[Action]:
    match kind:
        case "exit":
            return world.hear("launcher", m.ProcessExited(launch_id, 7, -9, "boom"))
        case "a stuck loop":
            world.beat(victim, loop_age_s=61.0)
            return world.wait(0.0, beating=False)
        case "gone connection":
            return world.handle(SendFailed(victim.encode(), None, vanished=True))
        case _:
            world.now += 2.9
            for worker in world.state.registry.alive():
                if worker.worker_id != victim:
                    world.beat(worker.worker_id)
            assert not of(world.wait(0.0, beating=False), Fail)
            return world.wait(0.1, beating=False)


def test_silence_is_judged_only_when_every_message_was_taken() -> None:
    """After a pause of the coordinator itself, beats lie behind other messages."""
    world = World()
    world.submit(request())
    world.now += 100
    assert delivered(world.first_token("p0")) == [10]
    assert states(world) == {"d0": "ready", "p0": "ready"}


def test_heartbeats_are_answered_to_living_members_only() -> None:
    world = World()
    assert world.beat("d0") == [Send(b"d0/heartbeat", m.HeartbeatAck(EPOCH))]
    assert world.beat("nobody") == []
    world.hear("launcher", m.ProcessExited("d0", 7, 1, ""))
    assert sent(world.beat("d0"), m.HeartbeatAck) == []
    stale = m.Heartbeat("p0", "another epoch", 0.0, m.WorkerStats())
    told = [Send(b"p0/heartbeat", m.HeartbeatAck(EPOCH))]
    assert world.hear("p0/heartbeat", stale) == told, "it learns that there is a new coordinator"
    forged = m.Heartbeat("p0", EPOCH, 0.0, m.WorkerStats())
    assert world.hear("someone/heartbeat", forged) == []


def test_a_prefill_worker_that_dies_behind_its_hand_off_costs_nothing() -> None:
    world = World()
    world.submit(request("a"), request("b"))
    for name in ("a", "b"):
        world.first_token("p0", row(0, 10, request_id=name), request_id=name)
    world.handed_over("p0", "a")
    world.tokens("d0", row(0, 10, 11, request_id="b"))  # its HandedOver is not here yet
    assert not of(world.hear("launcher", m.ProcessExited("p0", 7, -9, "")), Fail)
    actions = world.tokens("d0", row(1, 11, request_id="a"), row(2, 12, request_id="b"))
    assert delivered(actions) == [11, 12]


def test_scaling_up_starts_and_scaling_down_drains_the_newest() -> None:
    world = launched(1, 2)
    actions = world.state.scale(2, 2, world.now)
    assert sent(actions, m.Start) == [("launcher", m.Start("prefill-1", "prefill"))]
    actions = world.state.scale(1, 1, world.now)
    stops = [message for _, message in sent(actions, m.Stop)]
    assert stops == [m.Stop("prefill-1", 30.0), m.Stop("decode-1", 30.0)]
    assert [to for to, _ in sent(actions, m.Drain)] == ["decode-1-x"]
    assert states(world)["decode-1-x"] == "draining"
    assert not of(world.hear("launcher", m.ProcessExited("decode-1", 7, 0, "")), Fail)
    assert "decode-1-x" not in states(world), "it left as asked: no corpse"


def test_a_busy_worker_is_drained_when_it_has_finished() -> None:
    """So a request whose KV is on its way to it is not turned away."""
    world = launched(1, 2)
    world.submit(request("a"), request("b"))
    actions = world.state.scale(1, 1, world.now)
    assert not sent(actions, m.Drain)
    assert not sent(world.submit(request("c")), m.Drain)
    load = world.state.requests.legs.loads()["decode-1-x"]
    (name,) = [
        t.request.request_id
        for t in world.state.requests._tracked.values()
        if t.timeline.decode_worker_id == "decode-1-x"
    ]
    assert load.num_requests == 1, "new work goes to the other"
    world.first_token("prefill-0-x", row(0, 10, request_id=name), request_id=name)
    world.handed_over("prefill-0-x", name)
    actions = world.tokens("decode-1-x", row(0, 10, 11, request_id=name, finish="stop"))
    assert [to for to, _ in sent(actions, m.Drain)] == ["decode-1-x"]
    assert [message.launch_id for _, message in sent(actions, m.Stop)] == ["decode-1"]


def test_draining_has_a_deadline() -> None:
    world = launched(1, 2, drain_grace_s=20.0)
    world.submit(request("a", timeout_s=1000.0), request("b", timeout_s=1000.0))
    world.state.scale(1, 1, world.now)
    for _ in range(8):
        assert not sent(world.wait(2.4), m.Stop)
    assert sent(world.wait(2.4), m.Stop) == [("launcher", m.Stop("decode-1", 30.0))]


def test_scaled_away_while_it_was_starting() -> None:
    world = launched(1, 1)
    world.state.scale(1, 2, world.now)
    world.state.scale(1, 1, world.now)
    actions = world.join("decode", "late", "decode-1")
    assert [type(s.message) for s in of(actions, Send)] == [m.Welcome, m.Drain], "it has its Stop"
    assert world.state.registry.takers("decode")[0].worker_id == "decode-0-x"


@pytest.mark.parametrize("target", [(1, 0), (-1, 1), (1, -1), (10**9, 1)])
def test_impossible_targets(target: tuple[int, int]) -> None:
    world = launched()
    with pytest.raises(InvalidRequestError):
        world.state.scale(*target, world.now)
    assert world.state.pools.targets == {"prefill": 1, "decode": 1}


def test_prefill_may_be_scaled_to_nothing() -> None:
    world = launched()
    world.state.scale(0, 1, world.now)
    ((to, _),) = sent(world.submit(request()), m.Prefill)
    assert to == "decode-0-x"


def test_a_process_that_never_came_up_is_not_counted_any_more() -> None:
    world = launched()
    world.state.scale(2, 1, world.now)
    world.hear("launcher", m.ProcessExited("prefill-1", 7, 1, "no memory"))
    actions = world.state.scale(2, 1, world.now)
    assert sent(actions, m.Start) == [("launcher", m.Start("prefill-2", "prefill"))]


def test_a_misfit_is_rejected_and_never_given_work() -> None:
    world = World()
    ((to, reject),) = sent(world.join("decode", "small", num_blocks=4), m.Reject)
    assert to == "small"
    assert "64 tokens" in reject.reason and "512" in reject.reason, "both numbers"
    assert "small" not in states(world)


def test_a_dead_worker_may_not_come_back_under_its_name() -> None:
    world = World()
    world.hear("launcher", m.ProcessExited("d0", 7, -9, ""))
    ((_, reject),) = sent(world.hear("d0", hello("decode", "d0")), m.Reject)
    assert "d0" in reject.reason and "dead" in reject.reason


@pytest.mark.parametrize("token", ["", "guessed", "\N{SNOWMAN}"])
def test_nobody_joins_without_the_token_of_the_cluster(token: str) -> None:
    """sgl-project/sglang#32772: with an API key set, a fake worker could register all the same."""
    world = World(0, 0, cluster_token="secret")
    for one in (hello("decode", "rogue"), LAUNCHER_HELLO):
        actions = world.hear("rogue", dataclasses.replace(one, cluster_token=token))
        ((_, rejected),) = sent(actions, m.Reject)
        assert "stranger" in rejected.reason and "secret" not in rejected.reason
    assert states(world) == {}
    world.hear("own", dataclasses.replace(hello("decode", "own"), cluster_token="secret"))
    assert states(world) == {"own": "ready"}
