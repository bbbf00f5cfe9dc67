"""The life of the cluster's processes. Pure: messages, commands and time in, actions out.

Start ─► (starting) ─Hello, Welcome─► ready ─scale─► draining ─idle─► Drain, Stop ─► gone
             │                          │               │
             └──── ProcessExited, silence, a stuck loop ┴─────────────────────────► dead
"""

from __future__ import annotations

import logging

from coordinator.events import Action, Send
from coordinator.pools import Launch, Pools
from coordinator.registry import Registry, Worker
from splitserve.wire import messages as m

STOP_GRACE_S = 30.0
HEARTBEAT_SUFFIX = "/heartbeat"  # behind the worker_id: the identity of its heartbeat's socket

log = logging.getLogger(__name__)


class Members:
    """Owns who belongs to this coordinator's life (`epoch`), and the way to the launcher."""

    def __init__(self, epoch: str, registry: Registry, pools: Pools, drain_s: float) -> None:
        """`drain_s`: how long a draining worker may keep its requests."""
        self.registry = registry
        self.pools = pools
        self.started = False  # every worker asked for at the start was ready once
        self._epoch = epoch
        self._drain_s = drain_s
        self._launcher: bytes | None = None
        self._base_url: str | None = None
        self._told_ready = False

    # -- joining ------------------------------------------------------------------------------

    def hello(self, identity: bytes, hello: m.Hello, now: float) -> list[Action]:
        """A process introduces itself."""
        if hello.role == "launcher":
            return self._launcher_came(identity, hello)
        if refusal := self.registry.refusal(hello):
            log.warning("refused a worker: %s", refusal)
            return [Send(identity, m.Reject(refusal))]
        worker = self.registry.add(hello, identity, now)
        log.info("%s worker %s joined (pid %d)", worker.role, worker.worker_id, worker.pid)
        actions: list[Action] = [Send(identity, m.Welcome(self._epoch))]
        launch = self.pools.launches.get(worker.launch_id)
        if launch is not None and launch.stopping:  # scaled away while it started
            self._start_draining(worker, now)
        return [*actions, *self._check_complete()]

    def _launcher_came(self, identity: bytes, hello: m.Hello) -> list[Action]:
        if self._launcher not in (None, identity):
            log.warning("refused a second launcher, %s", hello.worker_id)
            return [Send(identity, m.Reject("this cluster has a launcher already"))]
        self._launcher = identity
        self._told_ready = False
        self.pools.forget_unborn(self.registry.alive())
        return [
            Send(identity, m.Welcome(self._epoch)),
            *self._start_missing(),
            *self._check_complete(),
        ]

    def launcher_vanished(self, identity: bytes) -> None:
        """Nobody is connected under that identity: if it was the launcher's, another may come."""
        if identity == self._launcher:
            self._launcher = None

    def http_opened(self, base_url: str) -> list[Action]:
        self._base_url = base_url
        return self._check_complete()

    def _check_complete(self) -> list[Action]:
        if not self.started and self.pools.complete(self.registry.alive()):
            self.started = True
            self.registry.fix_limits()
            if limits := self.registry.limits:
                most = limits.max_prompt_tokens, limits.max_total_tokens
                log.info("ready: a prompt may have %d tokens, with its answer %d", *most)
        if not self.started or self._told_ready or not self._launcher or not self._base_url:
            return []
        self._told_ready = True
        return [Send(self._launcher, m.Ready(self._epoch, self._base_url))]

    # -- living -------------------------------------------------------------------------------

    def heartbeat(self, identity: bytes, heartbeat: m.Heartbeat, now: float) -> list[Action]:
        """Only living members of this epoch are answered: the others learn that we went on."""
        own_socket = identity == (heartbeat.worker_id + HEARTBEAT_SUFFIX).encode()
        if not own_socket or heartbeat.epoch != self._epoch:
            return []
        if not self.registry.heard(heartbeat, now):
            return []
        return [Send(identity, m.HeartbeatAck(self._epoch))]

    def bury(self, worker: Worker, reason: str) -> list[Action]:
        """A worker is dead to us; its process, if it still exists, is killed by the launcher."""
        log.warning("%s worker %s is dead: %s", worker.role, worker.worker_id, reason)
        self.registry.bury(worker, reason)
        launch = self.pools.launches.get(worker.launch_id)
        return [] if launch is None else self._stop(launch, grace_s=0.0)

    def exited(self, identity: bytes, exited: m.ProcessExited) -> tuple[Worker, str] | None:
        """A process is gone; the worker that died with it, and why, if it was alive to us.

        Only the launcher is believed.
        """
        if identity != self._launcher:
            log.warning("dropped ProcessExited of %s: not from the launcher", exited.launch_id)
            return None
        launch = self.pools.launches.pop(exited.launch_id, None)
        worker = next((w for w in self.registry.alive() if w.launch_id == exited.launch_id), None)
        if worker is None:
            if launch is not None and not launch.stopping:
                log.warning(
                    "%s exited with code %d before it was ready: %s",
                    exited.launch_id,
                    exited.exit_code,
                    exited.last_lines,
                )
            return None
        return worker, f"its process (pid {exited.pid}) exited with code {exited.exit_code}"

    # -- scaling ------------------------------------------------------------------------------

    def scale(self, prefill: int, decode: int, now: float) -> list[Action]:
        """Change the targets. Raises InvalidRequestError; then nothing has changed."""
        self.pools.retarget(prefill, decode)
        actions: list[Action] = []
        for extra in self.pools.surplus(self.registry.alive()):
            if isinstance(extra, Launch):
                actions += self._stop(extra, grace_s=STOP_GRACE_S)
            else:
                self._start_draining(extra, now)
        return [*actions, *self._start_missing(), *self._check_complete()]

    def drain(self, busy: set[str], now: float) -> list[Action]:
        """Let draining workers go that hold no request any more, or have had their time.

        A worker hears Drain only when nothing that was routed to it can still arrive.
        """
        actions: list[Action] = []
        for worker in self.registry.alive():
            if worker.drain_by is None or worker.told_to_stop:
                continue
            if worker.worker_id not in busy or worker.drain_by <= now:
                worker.told_to_stop = True
                actions.append(Send(worker.identity, m.Drain(self._epoch, STOP_GRACE_S)))
                launch = self.pools.launches.get(worker.launch_id)
                actions += [] if launch is None else self._stop(launch, STOP_GRACE_S)
        return actions

    def due(self) -> float | None:
        """When there is something to do without a message."""
        drains = [
            w.drain_by
            for w in self.registry.alive()
            if w.drain_by is not None and not w.told_to_stop
        ]
        silent = self.registry.due()
        return min(drains if silent is None else [silent, *drains], default=None)

    def _start_draining(self, worker: Worker, now: float) -> None:
        worker.state = "draining"
        worker.drain_by = now + self._drain_s
        if launch := self.pools.launches.get(worker.launch_id):
            launch.stopping = True

    def _start_missing(self) -> list[Action]:
        if self._launcher is None:
            return []
        launches = self.pools.start_missing(self.registry.alive())
        return [Send(self._launcher, m.Start(one.launch_id, one.role)) for one in launches]

    def _stop(self, launch: Launch, grace_s: float) -> list[Action]:
        launch.stopping = True
        if self._launcher is None:
            return []
        return [Send(self._launcher, m.Stop(launch.launch_id, grace_s))]
