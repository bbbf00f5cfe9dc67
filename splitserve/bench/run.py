"""Sending a workload. Stamps are taken while it runs; what the bytes meant is found out after."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from splitserve.bench.mixed import MixedLoad, Send
from splitserve.bench.outcome import Outcome, looks_whole, outcome_of
from splitserve.bench.workloads import (
    BenchSpec,
    MixedSpec,
    Spec,
    arrival_times_s,
    completion_body,
    make_prompts,
    mixed_prompt,
    request_body,
)
from splitserve.bench_http import RawReply, Target, post, target_of
from splitserve.errors import SplitserveError


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that was seen of one run."""

    spec: Spec
    outcomes: tuple[Outcome, ...]
    wall_s: float
    client_cpu_share: float  # of one core, spent by this client


@dataclass(frozen=True, slots=True)
class _Ended:
    """A request that is over: the reply, or why there is none. Stamps as RawReply's."""

    reply: RawReply | str
    due_at: float
    sent_at: float
    ended_at: float
    num_asked: int
    kind: str = ""


class _Client:
    """Owns the clock of a run and the requests that have ended in it."""

    def __init__(self, target: Target, timeout_s: float, on_done: Callable[[], None]) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._on_done = on_done
        self._ended: list[_Ended] = []
        self._started_at = self._cpu_before_s = 0.0

    def start(self) -> None:
        """The run begins now; what had to be prepared is ready."""
        self._cpu_before_s, self._started_at = time.process_time(), time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._started_at

    async def send(self, body: dict[str, Any], due_s: float, kind: str = "") -> RawReply | str:
        """The reply, or why there is none; sent when due, `due_s` after the start."""
        await asyncio.sleep(max(0.0, due_s - self.now_s()))
        sent_at = time.perf_counter()
        reply: RawReply | str
        try:
            reply = await post(self._target, body, self._timeout_s)
            sent_at = reply.sent_at
        except SplitserveError as error:
            reply = str(error)
        except TimeoutError:
            reply = f"no complete answer within {self._timeout_s:g} s"
        due_at, ended_at = self._started_at + due_s, time.perf_counter()
        self._ended.append(_Ended(reply, due_at, sent_at, ended_at, body["max_tokens"], kind))
        self._on_done()
        return reply

    def run(self, spec: Spec) -> Run:
        """The run ends now. What was seen, in the order of sending."""
        wall_s, cpu_s = self.now_s(), time.process_time() - self._cpu_before_s
        ended = sorted(self._ended, key=lambda one: one.sent_at)
        return Run(spec, tuple(self._outcome(one) for one in ended), wall_s, cpu_s / wall_s)

    def _outcome(self, ended: _Ended) -> Outcome:
        return replace(
            outcome_of(ended.reply, ended.num_asked),
            kind=ended.kind,
            sent_s=ended.sent_at - self._started_at,
            ended_s=ended.ended_at - self._started_at,
            late_s=ended.sent_at - ended.due_at,
        )


async def run_load(
    spec: Spec,
    base_url: str,
    model: str,
    api_key: str | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> Run:
    """Send everything; returns when the last answer is in. `on_done` is called for each."""
    target = target_of(base_url, "/v1/completions", api_key)
    client = _Client(target, spec.timeout_s, on_done)
    if isinstance(spec, MixedSpec):
        await _mixed(spec, client, model)
    elif spec.request_rate is None:
        await _closed_loop(spec, client, model)
    else:
        await _open_loop(spec, client, model)
    return client.run(spec)


async def _closed_loop(spec: BenchSpec, client: _Client, model: str) -> None:
    """`concurrency` clients, each sending its next request when it has its answer."""
    pending = iter([request_body(spec, model, prompt) for prompt in make_prompts(spec)])

    async def one_client() -> None:
        for body in pending:
            await client.send(body, client.now_s())

    client.start()
    await _all_of([one_client() for _ in range(spec.concurrency or 1)])


async def _open_loop(spec: BenchSpec, client: _Client, model: str) -> None:
    """Requests leave on a Poisson schedule, whatever the server does."""
    bodies = [request_body(spec, model, prompt) for prompt in make_prompts(spec)]
    due = list(zip(bodies, arrival_times_s(spec), strict=True))
    client.start()
    await _all_of([client.send(body, due_s) for body, due_s in due])


async def _mixed(spec: MixedSpec, client: _Client, model: str) -> None:
    """Streams in their places, and every long prompt when it is due."""
    load = MixedLoad(spec)

    def body_of(send: Send) -> dict[str, Any]:
        is_stream = send.kind == "stream"
        tokens = spec.stream_output_tokens if is_stream else spec.long_output_tokens
        return completion_body(model, mixed_prompt(spec, send.kind, send.number), tokens)

    async def one_place(send: Send | None, body: dict[str, Any]) -> None:
        while send is not None:
            reply = await client.send(body, send.due_s, send.kind)
            send = load.ended(send, looks_whole(reply), client.now_s())
            body = body_of(send) if send else {}

    first = [(send, body_of(send)) for send in (*load.streams(), *load.long_prompts())]
    client.start()
    await _all_of([one_place(send, body) for send, body in first])


async def _all_of(parts: Sequence[Coroutine[Any, Any, object]]) -> None:
    """Wait for every part; when one breaks (a bug), the others end too."""
    async with asyncio.TaskGroup() as group:
        for part in parts:
            group.create_task(part)
