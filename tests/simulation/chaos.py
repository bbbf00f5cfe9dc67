"""What goes wrong in a run, drawn by its seed.

Gentle strikes are what users and operators may do at any time, and pauses that the protocol is
made to sit out: no request may fail for them. Hard ones break something.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from splitserve.config import ROLES, Role
from tests.simulation.brief import brief
from tests.simulation.channels import Noise
from tests.simulation.cluster import Cluster, Shape
from tests.simulation.process import SimProcess, Size
from tests.simulation.world import World

MAX_OPEN = 12
HARD_FREEZES_S = (4.0, 8.0)  # longer than a worker may be silent
GENTLE_FREEZES_S = (0.5, 2.0)
LONG_STEPS_S = (0.5, 4.0, 12.0)  # the last is longer than a transfer may stall


@dataclass(frozen=True, slots=True)
class Strike:
    """Something that may explain an error."""

    at: float
    name: str
    request_id: str = ""  # whose message was lost; empty: it hit all that was there


@dataclass(slots=True)
class Chaos:
    """Owns what befalls a cluster. Rates are per second."""

    world: World
    cluster: Cluster
    asks_per_s: float
    rates: dict[str, float]
    hard: list[Strike] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    is_over: bool = False

    GENTLE: ClassVar[tuple[str, ...]] = (
        "hang_up",
        "terminate",
        "scale",
        "restart",
        "pause",
        "pause_coordinator",
        "step",
    )
    HARD: ClassVar[tuple[str, ...]] = ("kill", "freeze", "kill_coordinator")

    def begin(self) -> None:
        self.cluster.network.noise.happened = self._spoilt
        self._repeat(self.asks_per_s, self._ask)
        for name, rate in self.rates.items():
            self._repeat(rate, getattr(self, name))

    def end(self) -> None:
        self.is_over = True
        noise = self.cluster.network.noise
        noise.drop_rate = noise.spoil_rate = 0.0

    def _repeat(self, rate: float, action: Callable[[], None]) -> None:
        """At random moments, as long as chaos lasts."""

        def happen() -> None:
            if not self.is_over:
                if self.cluster.coordinator_answers:
                    action()
                self.world.after(self.world.chance.expovariate(rate), happen)

        self.world.after(self.world.chance.expovariate(rate), happen)

    # -- what clients and operators do --------------------------------------------------------

    def _ask(self) -> None:
        if len(self.cluster.clients.open) < MAX_OPEN:
            self.cluster.coordinator.ask()

    def hang_up(self) -> None:
        if request_ids := list(self.cluster.clients.open):
            request_id = self.world.chance.choice(request_ids)
            self._count("hang_up", request_id)
            self.cluster.coordinator.hang_up(request_id)

    def scale(self) -> None:
        targets = self.world.chance.randint(0, 2), self.world.chance.randint(1, 3)
        self._count("scale", *targets)
        self.cluster.coordinator.scale(*targets)

    def restart(self) -> None:
        role = self.world.chance.choice(ROLES)
        self._count("restart", role)
        self.cluster.coordinator.restart(role)

    def terminate(self) -> None:
        if process := self._somebody():
            if not process.was_told_to_stop:  # a second SIGTERM kills
                self._count("terminate", process.worker_id)
                process.terminate()

    # -- what slows or breaks something -------------------------------------------------------

    def pause(self) -> None:
        self._freeze("pause", GENTLE_FREEZES_S)

    def pause_coordinator(self) -> None:
        """It is away for less than others may be silent to it, or it to them."""
        duration_s = self.world.chance.choice(GENTLE_FREEZES_S)
        self._count("pause_coordinator", duration_s)
        self.cluster.pause_coordinator(duration_s)

    def step(self) -> None:
        if process := self._somebody():
            process.long_step_s = self.world.chance.choice(LONG_STEPS_S)
            self._count("step", process.worker_id, process.long_step_s)

    def kill(self) -> None:
        """A worker that joined, or one that has not yet."""
        if places := list(self.cluster.launcher.places.values()):
            place = self.world.chance.choice(places)
            self._struck("kill", place.launch_id)
            place.kill()

    def freeze(self) -> None:
        self._freeze("freeze", HARD_FREEZES_S)

    def kill_coordinator(self) -> None:
        self._struck("kill_coordinator")
        self.cluster.kill_coordinator()

    def _freeze(self, name: str, durations_s: tuple[float, ...]) -> None:
        if process := self._somebody():
            duration_s = self.world.chance.choice(durations_s)
            (self._struck if name in self.HARD else self._count)(
                name, process.worker_id, duration_s
            )
            process.freeze(duration_s)

    def _somebody(self) -> SimProcess | None:
        """A worker that has joined and is not in trouble already."""
        now = self.world.now
        well = [p for p in self.cluster.launcher.processes if p.loop and p.frozen_until <= now]
        return self.world.chance.choice(well) if well else None

    def _count(self, name: str, *details: object) -> None:
        self.counts[name] += 1
        self.world.note("-" * 14, name, *details)

    def _spoilt(self, name: str, message: Any) -> None:
        self._count(name, brief(message))
        request_id = message.request_id.split(".")[0]
        self.hard.append(Strike(self.world.now, name, request_id))

    def _struck(self, name: str, *details: object) -> None:
        self._count(name, *details)
        self.hard.append(Strike(self.world.now, name))


def draw_shape(world: World, *, is_gentle: bool) -> Shape:
    """A cluster of chance."""
    chance = world.chance
    most = chance.choice((8, 16))
    budget_bytes = chance.choice((16_000, 1 << 20))  # the longest prompt in one frame fits
    num_blocks = chance.choice((12, 24, 40))
    decode = Size(
        num_blocks=chance.choice((12, 24, 40)),
        max_num_batched_tokens=chance.choice((8, 16)),
        max_num_seqs=chance.choice((3, 6)),
        budget_bytes=budget_bytes,
    )
    noise = Noise(
        drop_rate=0.0 if is_gentle else chance.choice((0.0, 0.0, 0.002, 0.01)),
        spoil_rate=0.0 if is_gentle else chance.choice((0.0, 0.0, 0.01)),
        repeat_rate=chance.choice((0.0, 0.0, 0.01)),
        frames_go_alone=chance.random() < 0.3,
    )
    targets: dict[Role, int] = {
        "prefill": chance.choice((0, 1, 1, 2)),
        "decode": chance.choice((1, 2, 2, 3)),
    }
    if not targets["prefill"]:  # those that come later have to take what decode workers take
        num_blocks = max(num_blocks, decode.num_blocks)
    prefill = Size(num_blocks, most, 6, budget_bytes)
    return Shape(targets, {"prefill": prefill, "decode": decode}, noise)


def draw_chaos(world: World, cluster: Cluster, *, is_gentle: bool) -> Chaos:
    """What befalls it: some of all that can."""
    chance = world.chance
    names = Chaos.GENTLE if is_gentle else Chaos.GENTLE + Chaos.HARD
    rates = {name: chance.choice((0.05, 0.2, 0.5)) for name in names if chance.random() < 0.6}
    return Chaos(world, cluster, asks_per_s=chance.choice((1.0, 4.0, 10.0)), rates=rates)
