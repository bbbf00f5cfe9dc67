"""The coordinator's process: the real state machine behind in-memory connections."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from coordinator import events as e
from coordinator.state import Settings, State
from splitserve.config import Role
from splitserve.errors import SplitserveError, UnavailableError
from splitserve.wire import messages as m
from tests.simulation.brief import brief
from tests.simulation.clients import Clients
from tests.simulation.world import Alarm, SimulationError, World

MAX_WAIT_S = 0.5
AFTER_MESSAGES_S = 1e-6  # a pause is over: first all that waits is taken
MAX_IDLE_TURNS = 2  # past what was due, and nothing done


class SimCoordinator:
    """Owns one life of the coordinator."""

    def __init__(
        self,
        world: World,
        clients: Clients,
        send: Callable[[e.Send], e.SendFailed | None],
        settings: Settings,
    ) -> None:
        self.state = State(settings)
        self.is_over = False
        self.paused_until = 0.0
        self._world = world
        self._clients = clients
        self._send = send
        self._events: deque[e.Event] = deque()
        self._alarm = Alarm(world, self._time_passed)
        self._num_idle_turns = 0
        self.apply(e.HttpOpened("http://host:1"))

    def apply(self, event: e.Event) -> bool:
        """Give the state machine an event; whether anything followed from it."""
        self._events.append(event)
        return self._run()

    def ask(self) -> None:
        """A client asks for something, if anything can be had."""
        try:
            asked = self._clients.draw(self.state.limits())
            actions = self.state.submit([asked.request], self._world.now)
        except UnavailableError as error:
            self._clients.refused(str(error))
            return
        self._clients.accepted(asked)
        request = asked.request
        what = (f"{len(request.token_ids)} + {request.sampling.max_tokens} tokens",)
        self._world.note(request.request_id, "asks", *what, f"n={len(request.choices)}")
        self._carry_out(actions)

    def hang_up(self, request_id: str) -> None:
        self._clients.hang_up(request_id)
        self.apply(e.RequestCancelled(request_id))

    def scale(self, prefill: int, decode: int) -> None:
        self._carry_out(self.state.scale(prefill, decode, self._world.now))

    def restart(self, role: Role) -> None:
        try:
            _, actions = self.state.restart(role, self._world.now)
        except SplitserveError:
            return
        self._carry_out(actions)

    def pause(self, duration_s: float) -> None:
        """Its process does nothing for a while."""
        self.paused_until = max(self.paused_until, self._world.now + duration_s)
        self._set_alarm()

    def end(self) -> None:
        """It was killed."""
        self.is_over = True
        self._alarm.cancel()
        self._clients.break_connections()

    def _carry_out(self, actions: Sequence[e.Action]) -> None:
        self._perform(actions)
        self._run()

    def _run(self) -> bool:
        acted = False
        while self._events:
            actions = self.state.handle(self._events.popleft(), self._world.now)
            self._perform(actions)
            acted = acted or bool(actions)
        self._set_alarm()
        return acted

    def _set_alarm(self) -> None:
        due = self.state.due()
        latest = self._world.now + MAX_WAIT_S
        moment = latest if due is None else min(latest, due)
        self._alarm.set_at(max(moment, self.paused_until + AFTER_MESSAGES_S))

    def _perform(self, actions: Sequence[e.Action]) -> None:
        for action in actions:
            match action:
                case e.Send():
                    if failed := self._send(action):
                        self._events.append(failed)
                case e.Deliver():
                    if stopped := self._clients.deliver(action):
                        self._events.append(stopped)
                case e.Finish():
                    self._clients.finish(action)
                case e.Fail():
                    self._clients.fail(action)

    def _time_passed(self) -> None:
        was_due = self.state.due()
        acted = self.apply(e.TimePassed())
        due = self.state.due()
        is_idle = not acted and due is not None and due <= self._world.now and due == was_due
        self._num_idle_turns = self._num_idle_turns + 1 if is_idle else 0
        if self._num_idle_turns > MAX_IDLE_TURNS:
            raise SimulationError("the coordinator's loop spins")


def note_received(world: World, identity: bytes, message: Any) -> None:
    if not isinstance(message, m.Heartbeat):
        world.note("coordinator", "<-", identity.decode(), brief(message))
