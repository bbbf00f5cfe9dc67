"""The cluster of one run: coordinator, launcher, workers and clients, and whether all is well."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from coordinator import events as e
from coordinator.state import Settings
from decode_worker.worker import DecodeWorker
from splitserve.config import ROLES, Role
from splitserve.wire import messages as m
from splitserve.wire.parts import HEARTBEAT_SUFFIX
from tests.simulation.channels import Network, Noise, over_the_wire
from tests.simulation.clients import TIMEOUT_S, Clients
from tests.simulation.coordinator import SimCoordinator, note_received
from tests.simulation.launcher import LAUNCHER, SimLauncher
from tests.simulation.membership import DRAIN_GRACE_S
from tests.simulation.process import SimProcess, Size
from tests.simulation.world import SimulationError, World

START_TIMEOUT_S = 30.0
TICK_S = 0.5


@dataclass(frozen=True, slots=True)
class Shape:
    """What a cluster is like at its start."""

    targets: dict[Role, int]
    sizes: dict[Role, Size]
    noise: Noise = field(default_factory=Noise)
    max_restarts: int = 1000


class Cluster:
    """Owns all of it."""

    def __init__(self, world: World, shape: Shape) -> None:
        """Up: every worker is ready."""
        self.world = world
        self.clients = Clients(world)
        self.network = Network(world, shape.noise)
        self.launcher = SimLauncher(self.network, self, shape.sizes)
        self._shape = shape
        self._num_lives = 0
        self._members: dict[bytes, SimProcess] = {}  # by identity, also those that have ended
        self.coordinator = self._new_coordinator()
        self.launcher.say_hello()
        self._wait_until_up()

    # -- as its processes see it --------------------------------------------------------------

    @property
    def coordinator_is_up(self) -> bool:
        return not self.coordinator.is_over

    @property
    def coordinator_answers(self) -> bool:
        return self.coordinator_ready_at() <= self.world.now

    def coordinator_ready_at(self) -> float:
        return self.coordinator.paused_until if self.coordinator_is_up else float("inf")

    def heard(self, identity: bytes, message: Any) -> None:
        """A message came to the coordinator."""
        note_received(self.world, identity, message)
        self.coordinator.apply(e.MessageReceived(identity, message))

    def exited(self, process: SimProcess, exit_code: int) -> None:
        self.launcher.exited(process, exit_code)

    # -- the coordinator's lives --------------------------------------------------------------

    def pause_coordinator(self, duration_s: float) -> None:
        self.coordinator.pause(duration_s)

    def kill_coordinator(self) -> None:
        """It is started again after a while."""
        self.world.note("coordinator", "is killed")
        self.coordinator.end()
        for process in self._all_processes():
            if process.is_gone:
                process.to_coordinator.lose_all()
            else:
                process.to_coordinator.lose_beginning()
            process.beats.lose_all()
            process.from_coordinator.lose_end()
            process.acks.lose_end()
            if not process.is_gone:
                self.world.after(0.01, process.coordinator_lost)
        self.launcher.to_coordinator.lose_all()
        self.launcher.from_coordinator.lose_end()
        self.world.after(self.world.chance.uniform(0.3, 2.0), self._comeback)

    def _comeback(self) -> None:
        self.coordinator = self._new_coordinator()
        self.launcher.say_hello()
        self.launcher.to_coordinator.resume()
        for process in self._all_processes():
            process.connected = True
            process.to_coordinator.resume()

    def _new_coordinator(self) -> SimCoordinator:
        self._num_lives += 1
        ready, targets = self.launcher.ready, self.launcher.targets
        wanted = self._shape.targets
        settings = Settings(
            f"e{self._num_lives}",
            4096,
            "t",
            num_prefill=targets.prefill if targets else wanted["prefill"],
            num_decode=targets.decode if targets else wanted["decode"],
            request_timeout_s=TIMEOUT_S,
            drain_grace_s=DRAIN_GRACE_S,
            max_restarts=self._shape.max_restarts,
            successor=ready is not None,
            promises=None if ready is None else ready.promises,
        )
        self.world.note("coordinator", "starts", settings.epoch)
        return SimCoordinator(self.world, self.clients, self._send, settings)

    def _send(self, action: e.Send) -> e.SendFailed | None:
        """Put a message of the coordinator on its way."""
        now, identity = self.world.now, action.identity
        if identity == LAUNCHER:
            received = over_the_wire(action.message, m.ToLauncher)
            self.launcher.from_coordinator.send(received, now)
            return None
        is_beat = identity.endswith(HEARTBEAT_SUFFIX)
        process = self._process(identity)
        if process is None or process.gone_is_known:
            return e.SendFailed(identity, action.message, vanished=True)
        received = over_the_wire(action.message, m.ToWorker)
        lane = process.acks if is_beat else process.from_coordinator
        lane.send(received, now)
        return None

    def _process(self, identity: bytes) -> SimProcess | None:
        self._all_processes()
        return self._members.get(identity.removesuffix(HEARTBEAT_SUFFIX))

    def _all_processes(self) -> list[SimProcess]:
        """Those that run, and those that ran once."""
        for process in self.launcher.processes:
            self._members.setdefault(process.worker_id.encode(), process)
        return list(self._members.values())

    # -- whether all is well ------------------------------------------------------------------

    def _wait_until_up(self) -> None:
        until = self.world.now + START_TIMEOUT_S
        while not self.coordinator.state.members.started:
            if self.world.now > until:
                raise SimulationError("the cluster did not come up")
            self.world.run_until(self.world.now + TICK_S)

    def run_for(self, duration_s: float) -> None:
        until = self.world.now + duration_s
        while self.world.now < until:
            self.world.run_until(min(until, self.world.now + TICK_S))
            self.clients.check_deadlines()

    def unrest(self) -> list[str]:
        """What is still held, awaited or missing."""
        found = [f"{request_id} is open" for request_id in self.clients.open]
        if not self.coordinator_is_up:
            return [*found, "there is no coordinator"]
        state = self.coordinator.state
        found += [f"the coordinator knows {request_id}" for request_id in state.requests.ids]
        found += [f"load at {worker_id}" for worker_id in state.requests.legs.loads()]
        if state.requests.legs.num_in_flight or len(state.requests.line):
            found.append("legs are left")
        for role in ROLES:
            here = [w.worker_id for w in state.registry.takers(role)]
            running = [p.worker_id for p in self.launcher.processes if p.role == role]
            wanted = state.pools.targets[role]
            if sorted(here) != sorted(running) or len(here) != wanted:
                found.append(f"{wanted} {role} workers are wanted, {here} of {running} are ready")
        for process in self.launcher.processes:
            found += _held_by(process)
        return found


def _held_by(process: SimProcess) -> list[str]:
    name, loop = process.worker_id, process.loop
    if loop is None:
        return [f"{name} has not joined"]
    loop.check_when_idle()
    counts = loop.blocks.counts
    found = [] if counts.free == counts.total else [f"{name} holds blocks: {counts}"]
    if isinstance(loop, DecodeWorker):
        found += [f"{name} decodes {s.request.key}" for s in loop.scheduler.sequences]
        found += [f"{name} takes in {key}" for key in loop.intake.keys]
    else:
        found += [f"{name} hands {key} over" for key in loop.handoffs.keys]
    dead = [host.worker_id for host in process.channel.hosts if host.is_gone]
    return [*found, *(f"{name} is connected to {other}, which is gone" for other in dead)]
