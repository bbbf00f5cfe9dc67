"""The launcher: starts, stops and reaps the processes of the simulation."""

from __future__ import annotations

from typing import Any

from splitserve.config import Role
from splitserve.wire import messages as m
from tests.simulation.brief import brief
from tests.simulation.channels import Network, over_the_wire
from tests.simulation.lanes import Lane
from tests.simulation.process import Hub, SimProcess, Size
from tests.simulation.world import Alarm

LAUNCHER = b"launcher"


class Place:
    """One launch: loading, then a process."""

    def __init__(self, launcher: SimLauncher, start: m.Start) -> None:
        world = launcher.network.world
        self.launch_id, self.role = start.launch_id, start.role
        self.started_at = world.now
        self.process: SimProcess | None = None
        self.stopping = False
        self.is_over = False
        self._launcher = launcher
        self.kill_alarm = Alarm(world, self.kill)
        self.load_alarm = Alarm(world, self._loaded)
        self.load_alarm.set_by(world.now + world.chance.uniform(0.2, 1.5))

    def _loaded(self) -> None:
        launcher = self._launcher
        size = launcher.sizes[self.role]
        self.process = SimProcess(launcher.network, launcher.hub, (self.launch_id, self.role), size)

    def terminate(self) -> None:
        if self.process is None or self.is_over:
            self._die(-15)
        else:
            self.process.terminate()

    def kill(self) -> None:
        self._die(-9)

    def _die(self, exit_code: int) -> None:
        if self.is_over:
            return
        self.kill_alarm.cancel()
        self.load_alarm.cancel()
        if self.process is None:
            self._launcher.reaped(self.launch_id, exit_code)
        else:
            self.process.end(exit_code)


class SimLauncher:
    """Owns the launches that have not ended."""

    def __init__(self, network: Network, hub: Hub, sizes: dict[Role, Size]) -> None:
        self.network = network
        self.hub = hub
        self.sizes = sizes
        self.places: dict[str, Place] = {}
        self.ready: m.Ready | None = None
        self.targets: m.Targets | None = None
        world = network.world
        self.to_coordinator: Lane[Any] = Lane(world, self._said, hub.coordinator_ready_at)
        self.from_coordinator: Lane[Any] = Lane(world, self._take, lambda: 0.0)

    @property
    def processes(self) -> list[SimProcess]:
        """Those that run."""
        found = [place.process for place in self.places.values()]
        return [process for process in found if process is not None and not process.is_gone]

    def say_hello(self) -> None:
        now = self.network.world.now
        launches = tuple(
            m.Launched(place.launch_id, place.role, now - place.started_at, place.stopping)
            for place in self.places.values()
        )
        self._say(m.Hello("launcher", "launcher", "launcher", 1, "host", launches=launches))

    def exited(self, process: SimProcess, exit_code: int) -> None:
        self.reaped(process.launch_id, exit_code)

    def reaped(self, launch_id: str, exit_code: int) -> None:
        """It has ended, and is forgotten when the coordinator is told."""
        place = self.places[launch_id]
        place.kill_alarm.cancel()
        place.load_alarm.cancel()
        exited = m.ProcessExited(launch_id, 1, exit_code, "")
        delay_s = self.network.world.chance.choice((0.0, 0.01, 0.2))
        place.is_over = True
        self.network.world.after(delay_s, lambda: self._tell(exited))

    def _tell(self, exited: m.ProcessExited) -> None:
        """When there is no coordinator, the next one learns from Hello what is left."""
        del self.places[exited.launch_id]
        if self.hub.coordinator_is_up:
            self._say(exited)

    def _say(self, message: Any) -> None:
        received = over_the_wire(message, m.ToCoordinator)
        self.to_coordinator.send(received, self.network.world.now)

    def _said(self, message: Any) -> None:
        self.hub.heard(LAUNCHER, message)

    def _take(self, message: m.ToLauncher) -> None:
        self.network.world.note("launcher", "<-", brief(message))
        match message:
            case m.Start(launch_id):
                if launch_id not in self.places:
                    self.places[launch_id] = Place(self, message)
            case m.Stop(launch_id, grace_s) if launch_id in self.places:
                place = self.places[launch_id]
                place.stopping = True
                place.kill_alarm.set_at(self.network.world.now + grace_s)
                place.terminate()
            case m.Targets():
                self.targets = message
            case m.Ready():
                self.ready = message
