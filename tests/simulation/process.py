"""One worker process: its loop, which is the real one, on virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from decode_worker.worker import DecodeWorker
from kv_transfer.receiver import StoreReceiver
from kv_transfer.tcp import TcpSender
from prefill_worker.worker import PrefillWorker
from splitserve.config import Liveness, Role
from splitserve.engine.batch import Chunk
from splitserve.errors import MismatchError
from splitserve.membership import CoordinatorLost, TerminationRequested
from splitserve.request import SampledToken
from splitserve.wire import messages as m
from splitserve.wire.channel import ControlReceived
from tests.fake_recorder import fake_recorder
from tests.fake_runner import FakeRunner, WrongKV
from tests.simulation.brief import brief
from tests.simulation.channels import Network, SimChannel, over_the_wire
from tests.simulation.lanes import Lane
from tests.simulation.membership import Paused, SimMembership
from tests.simulation.world import Alarm, SimulationError

TURN_S = 0.001  # what a turn of the loop takes by itself
MAX_IDLE_TURNS = 2  # with nothing to wait for, and nothing done


@dataclass(frozen=True, slots=True)
class Size:
    """What the workers of one role can do, the same for all of them."""

    num_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    budget_bytes: int  # of staging, for each peer


class Hub(Protocol):
    """The coordinator and the launcher, as a process sees them."""

    @property
    def coordinator_is_up(self) -> bool: ...

    def heard(self, identity: bytes, message: Any) -> None: ...

    def coordinator_ready_at(self) -> float: ...

    def exited(self, process: SimProcess, exit_code: int) -> None: ...


class TimedRunner(FakeRunner):
    """A fake model whose steps take virtual time, and that tells on whoever shows it wrong KV."""

    def spends(self, spend: Callable[[], None]) -> None:
        self._spend = spend

    def step(self, chunks: Sequence[Chunk]) -> list[tuple[SampledToken, ...]]:
        self._spend()
        try:
            return super().step(chunks)
        except WrongKV as error:
            raise WrongKVRead(f"{error}; {chunks}") from error


class WrongKVRead(BaseException):
    """The model was given KV that is not of the sequence.

    Not an Exception: the loop would take that for the failure of one request.
    """


class SimProcess:
    """Owns one worker process, from its start to its end."""

    def __init__(self, network: Network, hub: Hub, launch: tuple[str, Role], size: Size) -> None:
        """Loaded, and about to say Hello."""
        self.world = world = network.world
        self.launch_id, self.role = launch
        self.worker_id = f"{self.launch_id}-{world.chance.randrange(16**3):03x}"
        self.is_gone = self.gone_is_known = False
        self.connected = True
        self.was_told_to_stop = False
        self.frozen_until = 0.0
        self.step_s = world.chance.choice((0.005, 0.02, 0.02, 0.05))
        self.long_step_s = 0.0  # of the next step
        self.beat_every_s = Liveness().heartbeat_interval_s
        self.loop: PrefillWorker | DecodeWorker | None = None
        self._hub = hub
        self._size = size
        self._inbox: list[object] = []
        self._local = world.now
        self._in_turn = False
        self._num_idle_turns = 0
        self._membership: SimMembership | None = None
        self._wakes = Alarm(world, self._turn)
        self.to_coordinator: Lane[Any] = Lane(world, self._said, hub.coordinator_ready_at)
        self.beats: Lane[Any] = Lane(world, self._beaten, hub.coordinator_ready_at)
        self.from_coordinator: Lane[Any] = Lane(world, self._told, self.ready_at)
        self.acks: Lane[Any] = Lane(world, self._acked, self.ready_at)
        self._make_channel(network)
        self._say_hello()

    def _make_channel(self, network: Network) -> None:
        size = self._size
        self.runner = TimedRunner(size.num_blocks, size.max_num_batched_tokens, size.max_num_seqs)
        self.runner.spends(self._spend)
        receiver = StoreReceiver(self.runner.kv_cache) if self.role == "decode" else None
        self.channel = SimChannel(network, self, self.say, size.budget_bytes, receiver)
        endpoints = (self.channel.endpoint,) if self.role == "decode" else ()
        self.hello = m.Hello(
            self.worker_id, self.role, self.launch_id, 1, "host", endpoints, self.runner.facts()
        )

    # -- time ---------------------------------------------------------------------------------

    def clock(self) -> float:
        """Ahead of the world's while a turn takes time."""
        return self._local if self._in_turn else self.world.now

    def ready_at(self) -> float:
        """When it can take something in."""
        return float("inf") if self.is_gone else self.frozen_until

    @property
    def loop_age_s(self) -> float:
        """How long its loop has been in one turn."""
        return self.world.now - self._turned_at if self.world.now < self._local else 0.0

    def _spend(self) -> None:
        self._local += self.step_s + self.long_step_s
        self.long_step_s = 0.0

    # -- messages -----------------------------------------------------------------------------

    @property
    def num_events(self) -> int:
        return len(self._inbox)

    def post(self, event: object) -> None:
        if not self.is_gone:
            self._inbox.append(event)
            self._wake(self.world.now)

    def take_events(self, number: int) -> list[object]:
        taken, self._inbox = self._inbox[:number], self._inbox[number:]
        return taken

    def say(self, message: Any) -> None:
        """To the coordinator."""
        self.to_coordinator.send(over_the_wire(message, m.ToCoordinator), self.clock())

    def beat(self, heartbeat: m.Heartbeat) -> None:
        if self._hub.coordinator_is_up:
            self.beats.send(heartbeat, self.world.now)

    def _said(self, message: Any) -> None:
        self._hub.heard(self.worker_id.encode(), message)

    def _beaten(self, message: Any) -> None:
        self._hub.heard(f"{self.worker_id}/heartbeat".encode(), message)

    def _told(self, message: Any) -> None:
        self.world.note(self.worker_id, "<-", brief(message))
        self.post(ControlReceived(message, self.clock()))

    def _acked(self, message: m.HeartbeatAck) -> None:
        if self._membership is not None:
            self._membership.heard_epoch(message.epoch)

    # -- the loop -----------------------------------------------------------------------------

    def _wake(self, moment: float) -> None:
        self._wakes.set_by(max(moment, self._local, self.frozen_until))

    def _turn(self) -> None:
        """One turn of the loop, which is thrown out of it where it would wait."""
        if self.is_gone:
            return
        if self.frozen_until > self.world.now:
            self._wake(self.frozen_until)
            return
        self._local = self._turned_at = self.world.now
        if self._membership is None:
            self._join()
            return
        assert self.loop is not None
        self._membership.begin_turn()
        self._in_turn = True
        num_events, num_steps = len(self._inbox), self.loop.stats().num_steps
        try:
            self.loop.run()
        except Paused as paused:
            is_idle = not num_events and self.loop.stats().num_steps == num_steps
            self._wait(paused.timeout_s, is_idle)
        except MismatchError:
            self.end(1)
        else:
            self.end(0)
        finally:
            self._in_turn = False
        self.loop.blocks.check()

    def _wait(self, timeout_s: float | None, was_idle: bool) -> None:
        waits = timeout_s is None or timeout_s > 0
        self._num_idle_turns = self._num_idle_turns + 1 if was_idle and not waits else 0
        if self._num_idle_turns > MAX_IDLE_TURNS:
            raise SimulationError(f"the loop of {self.worker_id} spins")
        self._local += TURN_S
        if self._inbox:
            self._wake(self._local)
        elif timeout_s is not None:
            self._wake(self._local + timeout_s)

    # -- life ---------------------------------------------------------------------------------

    def _say_hello(self) -> None:
        if not self.is_gone and self._membership is None:
            self.say(self.hello)
            self.world.after(3.0, self._say_hello)

    def _join(self) -> None:
        """As Membership.join does: what comes before Welcome is dropped."""
        while self._inbox:
            match self._inbox.pop(0):
                case ControlReceived(m.Welcome(epoch)):
                    self._begin(epoch)
                    return
                case ControlReceived(m.Reject()) | TerminationRequested():
                    self.end(1)
                    return

    def _begin(self, epoch: str) -> None:
        self._membership = SimMembership(self, self.hello, epoch)
        runner: Any = self.runner
        channel: Any = self.channel
        who: Any = self._membership
        recorder = fake_recorder(self.clock)
        if self.channel.receiver is not None:
            self.loop = DecodeWorker(
                runner, channel, self.channel.receiver, who, recorder, self.clock
            )
        else:
            sender = TcpSender(channel, runner.kv_cache)
            self.loop = PrefillWorker(runner, channel, sender, who, recorder, self.clock)
        self._wake(self.world.now)

    def terminate(self) -> None:
        """SIGTERM: a second one ends the process at once."""
        if self.was_told_to_stop:
            self.end(-15)
        self.was_told_to_stop = True
        self.post(TerminationRequested())

    def freeze(self, duration_s: float) -> None:
        self.frozen_until = max(self.frozen_until, self.world.now + duration_s)
        self.world.at(self.frozen_until, self._thaw)

    def _thaw(self) -> None:
        self._wake(self.world.now)

    def coordinator_lost(self) -> None:
        self.connected = False
        self.post(CoordinatorLost())

    def end(self, exit_code: int) -> None:
        """With a negative code it was killed, and what it said last may not have left."""
        if self.is_gone:
            return
        self.world.note(self.worker_id, "exits with", exit_code)
        self.is_gone = True
        killed = exit_code < 0
        if killed:
            self.to_coordinator.lose_end()
        if not self._hub.coordinator_is_up:
            self.to_coordinator.lose_all()
        self.channel.close(lost=killed)
        self.world.after(0.05, self._become_known)
        self._hub.exited(self, exit_code)

    def _become_known(self) -> None:
        self.gone_is_known = True
