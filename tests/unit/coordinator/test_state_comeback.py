"""A coordinator that takes over from one that died, and a launcher that was away."""

from __future__ import annotations

from typing import Any

from coordinator.events import Action, HttpOpened, SendFailed
from coordinator.members import STOP_GRACE_S
from coordinator.pools import HELLO_AGAIN_S
from splitserve.config import Promises
from splitserve.wire import messages as m
from tests.unit.coordinator.test_state_launches import born, exit_of, starts
from tests.unit.coordinator.test_state_members import launched, states
from tests.unit.coordinator.world import BASE_URL, EPOCH, World, sent

PROMISES = Promises(256, 512, 8, 40, 16)


def successor(*launch_ids: str, **options: Any) -> tuple[World, list[Action]]:
    world = World(0, 0, **{"successor": True, "promises": PROMISES, **options})
    world.state.pools.targets = {"prefill": 1, "decode": 2}
    return world, world.hear("launcher", running(*launch_ids))


def running(*launch_ids: str, age_s: float = 1000.0) -> m.Hello:
    """A launcher's Hello. Of `~decode-1`, it says that it leaves."""
    launches = []
    for name in launch_ids:
        role: Any = name.strip("~").partition("-")[0]
        launches.append(m.Launched(name.strip("~"), role, age_s, name.startswith("~")))
    return m.Hello("launcher", "launcher", "launcher", 1, "host", launches=tuple(launches))


def test_a_new_coordinator_takes_over_the_workers_that_run() -> None:
    """smg-project/smg#2492: what only the coordinator knew was lost with it."""
    world, actions = successor("prefill-3", "decode-5", "decode-9")
    assert starts(actions) == []
    world.handle(HttpOpened(BASE_URL))
    assert not sent(born(world, "prefill-3"), m.Ready)
    assert sent(born(world, "decode-5"), m.Ready), "others may take their time"
    born(world, "decode-9")
    exit_of(world, "decode-5")
    assert starts(world.wait(0.6)) == ["decode-10"], "no name is used twice"


def test_it_starts_what_died_meanwhile_and_serves_with_the_rest() -> None:
    world, actions = successor("prefill-0", "decode-0")
    assert starts(actions) == ["decode-1"]
    world.handle(HttpOpened(BASE_URL))
    born(world, "prefill-0")
    assert sent(born(world, "decode-0"), m.Ready), "decode-1 may take its time"
    assert world.state.ready


def test_it_lets_go_what_is_over_the_target() -> None:
    """The one before died in a rolling restart, with a replacement beside the replaced."""
    world, _ = successor("prefill-0", "decode-0", "decode-1", "decode-2")
    born(world, "prefill-0")
    stops = [message for _, message in sent(born(world, "decode-0"), m.Stop)]
    assert stops == [m.Stop("decode-2", STOP_GRACE_S)], "the newest"


def test_a_worker_that_does_not_come_back_is_killed_and_replaced() -> None:
    world, _ = successor("prefill-0", "decode-0", "decode-1")
    born(world, "prefill-0")
    born(world, "decode-0")
    assert not sent(world.wait(HELLO_AGAIN_S - 0.1), m.Stop)
    stops = [message for _, message in sent(world.wait(0.2), m.Stop)]
    assert stops == [m.Stop("decode-1", 0.0)]
    assert starts(world.wait(0.6)) == ["decode-2"]


def test_one_that_was_still_loading_has_the_time_that_a_start_has() -> None:
    world = World(0, 0, successor=True, promises=PROMISES, start_timeout_s=300.0)
    world.state.pools.targets = {"prefill": 0, "decode": 2}
    world.hear("launcher", running("decode-0", "decode-1", age_s=10.0))
    born(world, "decode-0")
    assert world.state.ready, "it is not waited for"
    assert not sent(world.wait(289.0), m.Stop)
    assert sent(world.wait(2.0), m.Stop)


def test_what_was_promised_outlives_the_coordinator() -> None:
    """Without a prefill worker to ask, more would be promised than the next one can do."""
    world, actions = successor("decode-0", "decode-1")
    world.handle(HttpOpened(BASE_URL))
    assert starts(actions) == ["prefill-0"]
    ready = [message for _, message in sent(born(world, "decode-0"), m.Ready)]
    assert [Promises(*values(one.promises)) for one in ready] == [PROMISES]
    assert world.state.limits().max_prompt_tokens == 256
    smaller = world.join("prefill", "p", "prefill-0", num_blocks=16)  # of 16 tokens
    assert sent(smaller, m.Welcome)


def values(promises: Promises) -> list[int]:
    return [getattr(promises, name) for name in Promises.__dataclass_fields__]


def test_who_was_leaving_goes_on_leaving_and_its_name_is_not_given_again() -> None:
    world, actions = successor("prefill-0", "decode-0", "~decode-1")
    assert starts(actions) == ["decode-2"]
    born(world, "prefill-0")
    born(world, "decode-0")
    assert sent(born(world, "decode-1"), m.Drain)
    exit_of(world, "decode-1", 0)
    born(world, "decode-2")
    assert starts(world.wait(60.0)) == []
    assert not world.state.pools.failed


def test_a_launcher_that_was_away_is_known_again() -> None:
    """A stopped one loses its connection. What it was told meanwhile did not arrive."""
    world = launched(1, 2)
    world.handle(HttpOpened(BASE_URL))
    world.handle(SendFailed(b"launcher", None, vanished=True))
    world.handle(SendFailed(b"decode-1-x", None, vanished=True))
    assert starts(world.wait(1.0)) == [], "nobody is there to start it"
    actions = world.hear("launcher", running("prefill-0", "decode-0", "decode-1"))
    assert sent(actions, m.Welcome)
    assert sent(actions, m.Ready)
    assert starts(actions) == ["decode-2"]
    beat = m.Heartbeat("launcher", EPOCH, 0.0, m.WorkerStats())
    assert sent(world.hear("launcher", beat), m.HeartbeatAck)
    exit_of(world, "decode-0")
    assert starts(world.wait(0.6)) == ["decode-3"], "it is believed"


def test_a_hello_that_is_said_again_changes_nothing() -> None:
    world = launched(1, 2)
    world.state.restart("decode", world.now)
    lineages = [launch.lineage for launch in world.state.pools.launches.values()]
    names = [launch.launch_id for launch in world.state.pools.launches.values()]
    assert starts(world.hear("launcher", running(*names))) == []
    assert [launch.lineage for launch in world.state.pools.launches.values()] == lineages
    assert [to for to, _ in sent(born(world, "decode-2"), m.Drain)] == ["decode-0-x"]


def test_a_worker_in_a_long_step_lives_before_it_has_read_its_welcome() -> None:
    """vllm-project/vllm PR#45453: a long prefill looked dead."""
    world, _ = successor("prefill-0", "decode-0", "decode-1")
    for launch_id in ("prefill-0", "decode-0", "decode-1"):
        born(world, launch_id)
    for _ in range(10):
        world.now += 1.0
        for name in ("prefill-0-x", "decode-0-x", "decode-1-x"):
            old = m.Heartbeat(name, "the epoch before", 5.0, m.WorkerStats())
            assert sent(world.hear(f"{name}/heartbeat", old), m.HeartbeatAck)
        world.wait(0.0, beating=False)
    assert set(states(world).values()) == {"ready"}
