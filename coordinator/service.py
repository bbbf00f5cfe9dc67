"""What HTTP handlers may ask of the coordinator: the door between http_api and the loop."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from coordinator import events as e
from coordinator.cluster_view import cluster_sample, cluster_view
from coordinator.limits import Limits
from coordinator.measuring import Measuring
from coordinator.output import ChoiceOutput
from coordinator.profiles import Profile, Profiles
from coordinator.registry import Worker
from coordinator.state import State
from coordinator.tickets import Call, TicketBox
from splitserve.config import CoordinatorConfig, Role
from splitserve.metrics import Metrics
from splitserve.models import ModelFacts
from splitserve.request import Sampling
from splitserve.tokenizer import IncrementalDetokenizer, Tokenizer
from splitserve.wire.messages import Choice, Hello, Observe, Observed, ResetPrefixCache

TOKENIZE_INLINE_CHARS = 2_000  # a longer text is tokenized off the event loop
LOOP_STALE_S = 2.0
PAUSE_S = 1.0  # a loop that has not turned for longer stood still: it turns twice a second

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Order:
    """One validated prompt, as http_api hands it over. Everything in it fits the limits."""

    token_ids: tuple[int, ...]
    num_choices: int
    seed: int
    sampling: Sampling
    stop: tuple[str, ...]
    priority: int
    wants_timing: bool


class Service:
    """Owns the state machine's surroundings: the tickets, the metrics, the tokenizer.

    Everything runs on the event loop; actions that need the control channel go through `send`.
    """

    def __init__(
        self, config: CoordinatorConfig, state: State, facts: ModelFacts, tokenizer: Tokenizer
    ) -> None:
        self.config = config
        self.facts = facts
        self.tokenizer = tokenizer
        self.created = int(time.time())
        self.num_protocol_errors: Callable[[], int] = lambda: 0
        self.turned_at = time.monotonic()
        self._paused_s = 0.0  # how long the loop stood still, since the state heard of it
        self._state = state
        self._events: deque[e.Event] = deque()
        self._tickets = TicketBox(self._events.append)
        self._send: Callable[[e.Send], e.SendFailed | None] = lambda action: None
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")
        self._profiles = Profiles(time.monotonic)
        self.metrics = Metrics(
            config.served_model_names[0],
            lambda: cluster_sample(self._state, self.num_protocol_errors()),
        )
        self._measuring = Measuring(self.metrics, self._profiles)

    def attach(self, send: Callable[[e.Send], e.SendFailed | None]) -> None:
        """From now on messages go out through `send`."""
        self._send = send

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- the loop's side ----------------------------------------------------------------------

    def apply(self, event: e.Event) -> None:
        """Give the state machine an event, and carry out what follows from it."""
        self._events.append(event)
        self._run()

    def turn(self, *, all_taken: bool) -> None:
        """The loop has turned; `all_taken`: no message was left for the next turn."""
        now = time.monotonic()
        if now - self.turned_at > PAUSE_S:
            self._paused_s += now - self.turned_at
        self.turned_at = now
        self._measuring.turned(now)
        if all_taken:
            paused_s, self._paused_s = self._paused_s, 0.0
            self.apply(e.TimePassed(paused_s))

    def due(self) -> float | None:
        """When the next `turn` has something to do."""
        return self._state.due()

    def _run(self) -> None:
        while self._events:
            event = self._events.popleft()
            if isinstance(event, e.MessageReceived) and isinstance(event.message, Observed):
                self._observed(event.identity, event.message)
                continue
            if isinstance(event, e.MessageReceived):
                self._measuring.heard(event.message)
            if isinstance(event, e.ShutdownRequested):
                self._profiles.give_up("the coordinator stops")
            self._perform(self._state.handle(event, time.monotonic()))
            if isinstance(event, e.MessageReceived) and isinstance(event.message, Hello):
                self._perform(self._profiles.newcomers(self._state.registry.alive()))

    def _perform(self, actions: Sequence[e.Action]) -> None:
        for action in actions:
            match action:
                case e.Send():
                    failed = self._send(action)
                    if failed is not None:
                        self._events.append(failed)
                case e.Deliver():
                    self._deliver(action)
                case e.Finish() | e.Fail():
                    self._end(action)

    def _observed(self, identity: bytes, message: Observed) -> None:
        worker = self._state.registry.by_identity(identity)
        if worker is None or worker.worker_id != message.worker_id:
            return
        if not self._profiles.observed(message):  # a profile that no longer runs asked for it
            self._perform([self._stop_telling(worker)])

    def _deliver(self, action: e.Deliver) -> None:
        piece = self._tickets.deliver(action)
        if piece is not None:
            self._measuring.delivered(action, piece)

    def _end(self, action: e.Finish | e.Fail) -> None:
        ticket = self._tickets.end(action)
        if ticket is not None:
            self._measuring.ended(ticket)

    # -- the handlers' side -------------------------------------------------------------------

    def limits(self) -> Limits:
        """Raises UnavailableError before the cluster is ready."""
        return self._state.limits()

    def submit(self, orders: Sequence[Order], received_at: float) -> Call:
        """Take the prompts of one call in, all or none; `give_back` must follow.

        Raises OverloadedError or UnavailableError.
        """
        requests = [self._request(order, received_at) for order in orders]
        actions = self._state.submit(requests, time.monotonic())
        self._measuring.accepted(requests)
        call = self._tickets.open(
            [
                (request.request_id, self._outputs(order))
                for order, request in zip(orders, requests, strict=True)
            ]
        )
        self._perform(actions)
        self._run()
        return call

    def answered(self, call: Call) -> None:
        """All but the end of an answer went to the client."""
        self._measuring.answered(call)

    def give_back(self, call: Call) -> None:
        """The client has its answer, or is gone: what still runs for it is cancelled."""
        for ticket in call.tickets:
            cancelled = self._tickets.cancel(ticket.request_id)
            if cancelled is not None:
                self._measuring.ended(cancelled)
        self.answered(call)
        self._run()

    def scale(self, prefill: int, decode: int) -> dict[str, int]:
        """Change the targets. Raises InvalidRequestError or UnavailableError."""
        self._perform(self._state.scale(prefill, decode, time.monotonic()))
        self._run()
        return dict(self._state.pools.targets.items())

    def restart(self, role: Role) -> list[str]:
        """Replace the workers of a pool one by one; their ids. Raises UnavailableError."""
        worker_ids, actions = self._state.restart(role, time.monotonic())
        self._perform(actions)
        self._run()
        return worker_ids

    def reset_prefix_cache(self) -> list[str]:
        """Have every worker forget its cached blocks; their ids."""
        reset = ResetPrefixCache(self._state.settings.epoch)
        workers = self._state.registry.alive()
        self._perform([e.Send(worker.identity, reset) for worker in workers])
        self._run()
        return [worker.worker_id for worker in workers]

    def profile(self, duration_s: float, num_kernel_steps: int = 0) -> Profile:
        """Have every worker tell what it does; `end_profile` must follow.

        Raises OverloadedError.
        """
        workers = self._state.registry.alive()
        order = Observe(self._state.settings.epoch, duration_s, num_kernel_steps)
        start = {
            "model": self.config.served_model_names[0],
            "target": dict(self._state.pools.targets),
        }
        profile = self._profiles.begin(order, workers, start)
        try:
            self._perform([e.Send(worker.identity, order) for worker in workers])
        except BaseException:
            self._profiles.end(profile)  # nobody else will
            raise
        return profile

    def profile_lines(self, profile: Profile) -> AsyncIterator[dict[str, Any]]:
        """What workers and their requests do, as it happens."""
        return self._profiles.lines(profile)

    def end_profile(self, profile: Profile) -> None:
        """Its client has all of it, or is gone: when nobody looks any more workers hear of it."""
        if self._profiles.end(profile):
            workers = self._state.registry.alive()
            self._perform([self._stop_telling(worker) for worker in workers])

    def _stop_telling(self, worker: Worker) -> e.Send:
        return e.Send(worker.identity, Observe(self._state.settings.epoch, 0.0))

    def cluster(self) -> dict[str, object]:
        """As GET /cluster shows it."""
        return cluster_view(self._state, self.config, os.getpid(), time.monotonic())

    @property
    def ready(self) -> bool:
        return self._state.ready

    @property
    def healthy(self) -> bool:
        """Whether the loop turns and a decode worker is ready."""
        turning = time.monotonic() - self.turned_at < LOOP_STALE_S
        return turning and bool(self._state.registry.takers("decode"))

    async def off_loop(self, work: Callable[[], T], num_characters: int) -> T:
        """Run text work where it disturbs nobody: short texts here, long ones on a thread."""
        if num_characters <= TOKENIZE_INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _request(self, order: Order, received_at: float) -> e.NewRequest:
        return e.NewRequest(
            request_id=secrets.token_hex(12),
            token_ids=order.token_ids,
            choices=tuple(Choice(i, order.seed) for i in range(order.num_choices)),
            sampling=order.sampling,
            timeout_s=self.config.request_timeout_s,
            priority=order.priority,
            wants_timing=order.wants_timing,
            received_at=received_at,
        )

    def _outputs(self, order: Order) -> dict[int, ChoiceOutput]:
        min_tokens = order.sampling.min_tokens
        return {
            i: ChoiceOutput(i, IncrementalDetokenizer(self.tokenizer), order.stop, min_tokens)
            for i in range(order.num_choices)
        }
