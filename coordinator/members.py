"""The life of the cluster's processes. Pure: messages, commands and time in, actions out.

Start ─► (starting) ─Hello, Welcome─► ready ─scale, SIGTERM─► draining ─idle─► Drain, Stop ─► gone
   ▲         │                          │               │
   │         └──── ProcessExited, silence, a stuck loop ┴─────────────────────────────► dead
   └────────────────────────────────── after a while ────────────────────────────────────┘
"""

from __future__ import annotations

import logging

from coordinator.events import Action, Send
from coordinator.pools import Launch, Pools
from coordinator.registry import Registry, Worker
from coordinator.rolling import RollingRestart
from splitserve.logs import LimitedLog
from splitserve.process import describe_exit
from splitserve.wire import messages as m
from splitserve.wire.parts import HEARTBEAT_SUFFIX

STOP_GRACE_S = 30.0

MAX_SHOWN = 500  # characters of what a stranger says

log = logging.getLogger(__name__)
limited = LimitedLog(log)


class Members:
    """Owns who belongs to this coordinator's life (`epoch`), and the way to the launcher."""

    def __init__(
        self, epoch: str, registry: Registry, pools: Pools, drain_s: float, successor: bool
    ) -> None:
        """`drain_s`: how long a draining worker may keep its requests.

        A `successor` finds workers running, and takes over when one that decodes is back.
        """
        self.registry = registry
        self.pools = pools
        self.started = False  # every worker asked for at the start was ready once
        self._epoch = epoch
        self._drain_s = drain_s
        self._successor = successor
        self.rolling = RollingRestart(registry, pools)
        self._launcher: bytes | None = None
        self._base_url: str | None = None
        self._told_ready = False
        self._unreaped: dict[str, str] = {}  # worker_ids of the dead, by launch_id

    # -- joining ------------------------------------------------------------------------------

    def hello(self, identity: bytes, hello: m.Hello, now: float) -> list[Action]:
        """A process introduces itself."""
        if hello.role == "launcher":
            return self._launcher_came(identity, hello, now)
        known = self.registry.by_identity(identity)
        if known is not None and known.worker_id == hello.worker_id:
            return [Send(identity, m.Welcome(self._epoch))]  # it asks again
        if refusal := self.registry.refusal(hello):
            return self.reject(identity, refusal)
        worker = self.registry.add(hello, identity, now)
        log.info("%s worker %s joined (pid %d)", worker.role, worker.worker_id, worker.pid)
        actions: list[Action] = [Send(identity, m.Welcome(self._epoch))]
        launch = self.pools.launches.get(worker.launch_id)
        if launch is not None and launch.stopping:  # scaled away while it started
            worker.leaves_by_itself = True  # the launcher was asked to tell it
            self._start_draining(worker, now)
        return [*actions, *self._check_complete()]

    def reject(self, identity: bytes, reason: str) -> list[Action]:
        """A process can't join."""
        limited.warning("Hello", f"refused a Hello: {reason[:MAX_SHOWN]}")
        return [Send(identity, m.Reject(reason[:MAX_SHOWN]))]

    def _launcher_came(self, identity: bytes, hello: m.Hello, now: float) -> list[Action]:
        if self._launcher not in (None, identity):
            return self.reject(identity, "this cluster has a launcher already")
        self._launcher = identity
        self._told_ready = False
        self.pools.adopt(hello.launches, self.registry.alive(), now)
        return [
            Send(identity, m.Welcome(self._epoch)),
            self._tell_targets(identity),
            *self._start_missing(now),
            *self._check_complete(),
        ]

    def _tell_targets(self, launcher: bytes) -> Send:
        targets = self.pools.targets
        return Send(launcher, m.Targets(targets["prefill"], targets["decode"]))

    def launcher_vanished(self, identity: bytes) -> None:
        """Nobody is connected under that identity: if it was the launcher's, another may come."""
        if identity == self._launcher:
            self._launcher = None

    def http_opened(self, base_url: str) -> list[Action]:
        self._base_url = base_url
        return self._check_complete()

    def _check_complete(self) -> list[Action]:
        if not self.started and self._is_complete():
            self.started = True
            self.registry.fix_limits()
            if limits := self.registry.limits:
                most = limits.max_prompt_tokens, limits.max_total_tokens
                log.info("ready: a prompt may have %d tokens, with its answer %d", *most)
        if not self.started or self._told_ready or not self._launcher or not self._base_url:
            return []
        self._told_ready = True
        assert self.registry.limits is not None
        return [Send(self._launcher, m.Ready(self._epoch, self._base_url, self.registry.limits))]

    def _is_complete(self) -> bool:
        if not self.registry.takers("decode"):
            return False
        # For a successor, who is back is enough to go on with: what was promised is known.
        takes_over = self._successor and self._launcher is not None and self.registry.limits
        return bool(takes_over) or self.pools.complete(self.registry.alive())

    # -- living -------------------------------------------------------------------------------

    def heartbeat(self, identity: bytes, heartbeat: m.Heartbeat, now: float) -> list[Action]:
        """Living members of this epoch are answered, and those of another: they learn of this one.

        The dead are not: they learn that we went on.
        """
        ack = Send(identity, m.HeartbeatAck(self._epoch))
        if identity == self._launcher:
            return [ack]
        known = self.registry.workers.get(heartbeat.worker_id)
        owner = identity.removesuffix(HEARTBEAT_SUFFIX)
        if owner == identity or (known is not None and owner != known.identity):
            return []
        # A member may beat of the epoch before: it is in a long step, its Welcome waits.
        worker = self.registry.heard(heartbeat, now)
        if worker is None:
            return self._heard_no_member(heartbeat, ack)
        worker.leaves_by_itself |= heartbeat.draining
        if heartbeat.draining and worker.state == "ready":
            log.info("%s was told to stop by somebody else", worker.worker_id)
            if launch := self.pools.launches.get(worker.launch_id):
                self.pools.leaves(launch, now)
            self._start_draining(worker, now)
        return [ack]

    def _heard_no_member(self, heartbeat: m.Heartbeat, ack: Send) -> list[Action]:
        """The dead are killed by the launcher; those that it doesn't run are told."""
        dead = self.registry.workers.get(heartbeat.worker_id)
        if dead is None:
            return [ack] if heartbeat.epoch != self._epoch else []
        if dead.launch_id in self.pools.launches:
            return []
        return self.reject(dead.identity, f"{dead.worker_id} was declared dead: {dead.death}")

    def bury(self, worker: Worker, reason: str, now: float, *, reaped: bool) -> list[Action]:
        """A worker is dead to us; its process, unless it was reaped, is killed by the launcher."""
        log.warning("%s worker %s is dead: %s", worker.role, worker.worker_id, reason)
        self.registry.bury(worker, reason)
        actions = self.peer_gone(worker.worker_id, reaped)
        if not reaped:
            self._unreaped[worker.launch_id] = worker.worker_id
        if launch := self.pools.launches.get(worker.launch_id):
            self._lost(launch, reason, now)
            actions += self._stop(launch, grace_s=0.0)
        return actions

    def _lost(self, launch: Launch, reason: str, now: float) -> None:
        ends_rolling = launch.replaces is not None and not launch.stopping
        self.pools.lost(launch, reason, now)
        if ends_rolling:
            log.error("the rolling restart ends here: %s: %s", launch.launch_id, reason)
            self.rolling.end()

    def exited(
        self, identity: bytes, exited: m.ProcessExited, now: float
    ) -> tuple[Worker | None, str]:
        """A process is gone: the worker that died with it, if it was alive to us, and why.

        Only the launcher is believed.
        """
        reason = f"its process (pid {exited.pid}) {describe_exit(exited.exit_code)}"
        if identity != self._launcher:
            name = exited.launch_id[:MAX_SHOWN]
            limited.warning("exit", f"dropped ProcessExited of {name}: not from the launcher")
            return None, reason
        launch = self.pools.launches.get(exited.launch_id)
        worker = next((w for w in self.registry.alive() if w.launch_id == exited.launch_id), None)
        if launch is not None and not launch.stopping:
            if worker is None:
                log.warning("%s was not ready yet: %s", exited.launch_id, reason)
            self._lost(launch, reason, now)
        self.pools.exited(exited.launch_id, exited.last_lines)
        return worker, reason

    def reaped(self, launch_id: str) -> list[Action]:
        """A worker that had been declared dead can't write any more."""
        worker_id = self._unreaped.pop(launch_id, None)
        return [] if worker_id is None else self.peer_gone(worker_id, reaped=True)

    def peer_gone(self, worker_id: str, reaped: bool) -> list[Action]:
        message = m.PeerGone(worker_id, self._epoch, reaped)
        others = [w for w in self.registry.alive() if w.worker_id != worker_id]
        return [Send(w.identity, message) for w in others]

    # -- scaling ------------------------------------------------------------------------------

    def scale(self, prefill: int, decode: int, now: float) -> list[Action]:
        """Change the targets. Raises InvalidRequestError; then nothing has changed."""
        self.pools.retarget(prefill, decode)
        self.rolling.end()
        actions = self._drain_surplus(now)
        if self._launcher is not None:
            actions.append(self._tell_targets(self._launcher))
        return [*actions, *self._start_missing(now, is_planned=True), *self._check_complete()]

    def _drain_surplus(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for extra in self.pools.surplus(self.registry.alive()):
            if isinstance(extra, Launch):
                actions += self._stop(extra, grace_s=STOP_GRACE_S)
            else:
                self._start_draining(extra, now)
        return actions

    def settle(self, now: float) -> list[Action]:
        """What any event may have made due: restarts, and the next step of a rolling one."""
        actions: list[Action] = []
        for launch in self.pools.overdue(self.registry.alive(), now):
            self._lost(launch, "it did not say Hello in time", now)
            actions += self._stop(launch, grace_s=0.0)
        actions += [*self._check_complete(), *self._start_missing(now)]
        if self.started and self._successor and self._launcher is not None:
            self._successor = False  # it may have found a replacement beside the replaced
            actions += self._drain_surplus(now)
        return [*actions, *self._replace_next(now)]

    def _replace_next(self, now: float) -> list[Action]:
        if self._launcher is None:
            return []
        match self.rolling.step(now):
            case Launch(launch_id, role):
                return [Send(self._launcher, m.Start(launch_id, role))]
            case Worker() as worker:
                self._start_draining(worker, now)
        return []

    def overdue(self, now: float) -> list[Worker]:
        """Draining workers that have had their time and still hold requests."""
        alive = self.registry.alive()
        return [w for w in alive if w.drain_by is not None and w.drain_by <= now]

    def drain(self, busy: set[str]) -> list[Action]:
        """Let draining workers go that hold no request any more.

        A worker hears Drain only when nothing that was routed to it can still arrive.
        """
        actions: list[Action] = []
        for worker in self.registry.alive():
            if worker.drain_by is None or worker.told_to_stop or worker.worker_id in busy:
                continue
            worker.told_to_stop = True
            actions.append(Send(worker.identity, m.Drain(self._epoch, STOP_GRACE_S)))
            launch = self.pools.launches.get(worker.launch_id)
            if launch is not None and not worker.leaves_by_itself:  # a second SIGTERM would kill it
                actions += self._stop(launch, STOP_GRACE_S)
        return actions

    def due(self) -> float | None:
        """When there is something to do without a message."""
        alive = self.registry.alive()
        drains = [w.drain_by for w in alive if w.drain_by is not None and not w.told_to_stop]
        can_start = self._launcher is not None
        others = (self.registry.due(), self.pools.due(alive, can_start))
        return min([*drains, *(due for due in others if due is not None)], default=None)

    def _start_draining(self, worker: Worker, now: float) -> None:
        worker.state = "draining"
        worker.drain_by = now + self._drain_s
        if launch := self.pools.launches.get(worker.launch_id):
            launch.stopping = True

    def _start_missing(self, now: float, is_planned: bool = False) -> list[Action]:
        if self._launcher is None:
            return []
        alive = self.registry.alive()
        self.pools.reclaim(alive)
        launches = self.pools.start_missing(alive, now, is_planned)
        return [Send(self._launcher, m.Start(one.launch_id, one.role)) for one in launches]

    def _stop(self, launch: Launch, grace_s: float) -> list[Action]:
        launch.stopping = True
        if self._launcher is None:
            return []
        return [Send(self._launcher, m.Stop(launch.launch_id, grace_s))]
