"""The coordinator's state machine: events in, actions out, the clock an argument.

It joins the life of processes (members.py) to the life of requests (requests.py). It is
synchronous and knows no socket; server.py carries its actions out.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator import events as e
from coordinator.dispatcher import Dispatcher
from coordinator.events import Action
from coordinator.limits import Limits
from coordinator.members import Members
from coordinator.pools import Pools
from coordinator.registry import Registry, Worker
from coordinator.requests import Requests
from coordinator.router import Policy, Router
from coordinator.waiting import WaitingLine
from splitserve.config import Liveness, Promises, Role
from splitserve.errors import RequestFailedError, UnavailableError
from splitserve.logs import LimitedLog
from splitserve.wire import messages as m

Report = m.FirstToken | m.HandedOver | m.Tokens | m.Observed | m.Failed

log = LimitedLog(logging.getLogger(__name__))


@dataclass(frozen=True, slots=True)
class Settings:
    """What the state machine is told at its start."""

    epoch: str
    model_max_len: int
    tokenizer_fingerprint: str
    num_prefill: int = 1
    num_decode: int = 1
    router: Policy = "least_loaded"
    max_queue: int = 256
    request_timeout_s: float = 600.0
    drain_grace_s: float = 30.0
    max_restarts: int = 5
    start_timeout_s: float = 600.0
    successor: bool = False
    promises: Promises | None = None  # of the coordinator before
    cluster_token: str = ""
    liveness: Liveness = Liveness()  # noqa: RUF009 (frozen)


class State:
    """Owns all the coordinator knows about the cluster and its requests."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.registry = Registry(
            settings.liveness,
            settings.model_max_len,
            settings.tokenizer_fingerprint,
            settings.promises,
        )
        self.pools = Pools(
            settings.num_prefill,
            settings.num_decode,
            settings.max_restarts,
            settings.start_timeout_s,
        )
        self.members = Members(
            settings.epoch,
            self.registry,
            self.pools,
            drain_s=settings.drain_grace_s,
            successor=settings.successor,
        )
        self.dispatcher = Dispatcher(
            settings.epoch,
            self.registry,
            Router(settings.router),
            settings.liveness.stall_timeout_s,
        )
        self.requests = Requests(
            settings.epoch,
            self.registry,
            self.dispatcher,
            WaitingLine(settings.max_queue),
            self._somebody_decodes,
        )
        self.shutting_down = False

    # -- commands, which can be refused -------------------------------------------------------

    def limits(self) -> Limits:
        """How large a request may be. Raises UnavailableError before they are known."""
        if self.shutting_down:
            raise UnavailableError("the cluster is shutting down")
        if self.registry.limits is None:
            targets = self.pools.targets
            raise UnavailableError(
                f"the cluster is starting: {len(self.registry.takers('prefill'))} of "
                f"{targets['prefill']} prefill and {len(self.registry.takers('decode'))} of "
                f"{targets['decode']} decode workers are ready"
            )
        return self.registry.limits

    def submit(self, requests: Sequence[e.NewRequest], now: float) -> list[Action]:
        """Take requests in, all or none. Raises UnavailableError or OverloadedError."""
        self.limits()
        self.requests.accept(requests, now)
        return self.requests.dispatch(now)

    def scale(self, prefill: int, decode: int, now: float) -> list[Action]:
        """Change the number of workers. Raises InvalidRequestError, or UnavailableError."""
        if self.shutting_down:
            raise UnavailableError("the cluster is shutting down")
        actions = self.members.scale(prefill, decode, now)
        return [*actions, *self._settle(now)]

    def restart(self, role: Role, now: float) -> tuple[list[str], list[Action]]:
        """Replace the workers of a pool one by one: the worker_ids of those, and what to do first.

        Raises UnavailableError.
        """
        if self.shutting_down:
            raise UnavailableError("the cluster is shutting down")
        replaced = self.members.rolling.begin(role)
        return replaced, self._settle(now)

    @property
    def ready(self) -> bool:
        """As GET /ready means it."""
        serving = bool(self.registry.takers("decode")) and not self.shutting_down
        return self.members.started and serving

    # -- events -------------------------------------------------------------------------------

    def handle(self, event: e.Event, now: float) -> list[Action]:
        """What to do about an event."""
        match event:
            case e.MessageReceived(identity, message):
                actions = self._message(identity, message, now)
            case e.RequestCancelled(request_id):
                actions = self.requests.cancel(request_id, now)
            case e.ChoiceStopped():
                actions = self.requests.choice_stopped(event, now)
            case e.SendFailed():
                actions = self._send_failed(event, now)
            case e.HttpOpened(base_url):
                actions = self.members.http_opened(base_url)
            case e.ShutdownRequested():
                actions = self._shut_down(now)
            case e.TimePassed(paused_s):
                self.registry.forgive(paused_s)
                actions = self._bury_the_silent(now)
        return [*actions, *self._settle(now)]

    def due(self) -> float | None:
        """When TimePassed has something to do."""
        dues = [self.requests.due(), self.members.due()]
        return min((due for due in dues if due is not None), default=None)

    def _somebody_decodes(self) -> bool:
        """Now, or as soon as the replacement of one that leaves is ready."""
        coming = self.pools.is_coming("decode", self.registry.alive())
        return bool(self.registry.takers("decode")) or coming

    def _settle(self, now: float) -> list[Action]:
        """What any event may have made due."""
        actions = self.requests.expire(now)
        for worker in self.members.overdue(now):
            actions += self.requests.move_away(worker, now)
        actions += self.requests.dispatch(now)
        if not self.shutting_down:
            actions += self.members.settle(now)
        if any(worker.state == "draining" for worker in self.registry.alive()):
            actions += self.members.drain(set(self.requests.legs.loads()))
        return actions

    def _bury_the_silent(self, now: float) -> list[Action]:
        """Only when time has passed, that is, when every message that is here was taken: after a
        pause of our own, heartbeats lie behind other messages."""
        actions: list[Action] = []
        for worker, reason in self.registry.silent(now):
            actions += self._died(worker, reason, now)
        return actions

    def _message(self, identity: bytes, message: m.ToCoordinator, now: float) -> list[Action]:
        match message:
            case m.Hello():
                if not self._knows_us(message):
                    return self.members.reject(identity, f"{message.worker_id} is a stranger here")
                return self.members.hello(identity, message, now)
            case m.Heartbeat():
                return self.members.heartbeat(identity, message, now)
            case m.ProcessExited():
                return self._exited(identity, message, now)
        worker = self.registry.by_identity(identity)
        if worker is None or message.epoch != self.settings.epoch:
            name = type(message).__name__
            log.warning(name, f"dropped {name} from {identity!r}, which is no member")
            return []
        return self._report(worker, message, now)

    def _report(self, worker: Worker, message: Report, now: float) -> list[Action]:
        """What a member says of its work."""
        match message:
            case m.FirstToken():
                return self.requests.first_token(worker, message, now)
            case m.HandedOver():
                return self.requests.handed_over(worker, message, now)
            case m.Tokens():
                return self.requests.tokens(worker, message, now)
            case m.Failed():
                return self.requests.failed(worker, message, now)
            case m.Observed():
                return []  # profiles take it; nothing here depends on it

    def _knows_us(self, hello: m.Hello) -> bool:
        ours, theirs = self.settings.cluster_token.encode(), hello.cluster_token.encode()
        return not ours or secrets.compare_digest(ours, theirs)

    def _exited(self, identity: bytes, message: m.ProcessExited, now: float) -> list[Action]:
        worker, reason = self.members.exited(identity, message, now)
        if worker is None:
            return self.members.reaped(message.launch_id)
        if worker.told_to_stop and message.exit_code == 0:
            self.registry.remove(worker)
            gone = self.members.peer_gone(worker.worker_id, reaped=True)
            return [*gone, *self.requests.worker_died(worker, "it was stopped", now)]
        return self._died(worker, reason, now, reaped=True)

    def _died(
        self, worker: Worker, reason: str, now: float, *, reaped: bool = False
    ) -> list[Action]:
        return [
            *self.members.bury(worker, reason, now, reaped=reaped),
            *self.requests.worker_died(worker, reason, now),
        ]

    def _send_failed(self, failed: e.SendFailed, now: float) -> list[Action]:
        """A worker that can't be reached can't be given work, nor report on what it has."""
        if failed.vanished:
            self.members.launcher_vanished(failed.identity)
        worker = self.registry.by_identity(failed.identity)
        if worker is None or worker.told_to_stop:
            return []
        if failed.vanished:
            return self._died(worker, "its control connection is gone", now)
        return self.requests.not_sent(worker, failed.message, now)

    def _shut_down(self, now: float) -> list[Action]:
        self.shutting_down = True
        actions: list[Action] = []
        for request_id in self.requests.ids:
            error = RequestFailedError("the cluster was shut down", stage="internal", status=503)
            actions += self.requests.fail(request_id, error, now)
        return actions
