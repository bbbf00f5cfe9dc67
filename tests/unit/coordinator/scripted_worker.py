"""Workers that compute nothing: they speak the real protocol over real sockets, by a script.

A prefill worker hands its prompts to its decode worker by a method call, where real ones use the
data channel. Answers are texts; the byte tokenizer of tests/tiny_models.py makes a token a byte.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from splitserve.config import CurveKeys, Fingerprint, KVLayout, Role
from splitserve.request import TokenLogprobs
from splitserve.scheduling.finish import finish_reason
from splitserve.wire import messages as m
from splitserve.wire.codec import Decoder, encode
from splitserve.wire.curve import apply_client

LAYOUT = KVLayout("float32", num_layers=2, num_kv_heads=2, head_dim=32, block_size=16)
HANDOFF_TIMES = m.HandoffTimes(0.0, 0.003, 0.005, 0.001, 0.004)
_numbers = itertools.count()


def facts(fingerprint: Fingerprint, **changes: int) -> m.WorkerFacts:
    values: dict[str, Any] = {
        "num_blocks": 64,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "max_model_len": 512,
        "num_cores": 16,
        "weight_bytes_per_number": 1,
        **changes,
    }
    return m.WorkerFacts(
        **values, layout=LAYOUT, fingerprint=fingerprint, num_threads=1, device="cpu"
    )


@dataclass(slots=True)
class Script:
    """How workers answer: `answer` gives the bytes of one choice (cycled when it is too short).

    `step_s` is the time of a decode step; with `tokens_per_row` several tokens come at once.
    `hold` keeps prompts from being computed for as long as it is set.
    """

    answer: Callable[[m.Prefill, m.Choice], bytes] = lambda prefill, choice: b"abcdefgh"
    step_s: float = 0.0
    tokens_per_row: int = 1
    hold: threading.Event = field(default_factory=threading.Event)
    fail: tuple[m.Stage, str] | None = None
    handover_after_s: float = 0.0


class ScriptedWorker:
    """Owns one worker's two sockets and its thread."""

    def __init__(
        self,
        role: Role,
        endpoint: str,
        worker_facts: m.WorkerFacts,
        script: Script | None = None,
        keys: CurveKeys | None = None,
        launch_id: str = "",
    ) -> None:
        self.worker_id = f"{role}-scripted-{next(_numbers)}"
        self.role = role
        self.script = script or Script()
        self.prefills: list[m.Prefill] = []
        self.releases: list[m.Release] = []
        self.received: list[object] = []
        self.rejected: str | None = None
        self.num_tokens_sent = 0
        self.decoder: ScriptedWorker | None = None
        self.epoch = ""
        self._launch_id = launch_id or self.worker_id
        self._facts = worker_facts
        self._endpoint, self._keys = endpoint, keys
        self._inbox: queue.SimpleQueue[m.Prefill] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[m.ToCoordinator] = queue.SimpleQueue()
        self._running: dict[str, _Running] = {}
        self._held: list[m.Prefill] = []
        self._later: list[tuple[float, m.ToCoordinator]] = []
        self._stop = threading.Event()
        self._silent = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def say(self, message: m.ToCoordinator) -> None:
        """Send something out of turn."""
        self._outbox.put(message)

    def go_silent(self) -> None:
        """No heartbeat and no word any more, as a frozen process."""
        self._silent.set()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5.0)

    @property
    def num_requests(self) -> int:
        """Requests it holds."""
        return len(self._running) + len(self._held)

    # -- the worker's thread ------------------------------------------------------------------

    def _run(self) -> None:
        context = zmq.Context()
        control = self._dealer(context, self.worker_id)
        heart = self._dealer(context, f"{self.worker_id}/heartbeat")
        control.send(encode(self._hello()))
        beat_at = 0.0
        while not self._stop.is_set():
            if not self._silent.is_set():
                self._turn(control)
                if self.epoch and time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + 0.1
                    heart.send(encode(self._heartbeat()))
            while heart.poll(0):
                heart.recv_multipart()
            control.poll(1 if self._running else 5)
        for socket in (control, heart):
            socket.close()
        context.term()

    def _turn(self, control: zmq.Socket[bytes]) -> None:
        decoder: Decoder[m.ToWorker] = Decoder(m.ToWorker)
        while control.poll(0):
            self._take(decoder.decode(control.recv_multipart()[0]))
        while not self._inbox.empty():
            prompt = self._inbox.get()
            self._running[prompt.request_id] = _Running(prompt, self.script, first_index=1)
        if not self.script.hold.is_set():
            for prompt in self._held:
                self._prefill(prompt)
            self._held.clear()
        self._step()
        while not self._outbox.empty():
            control.send(encode(self._outbox.get()))

    def _take(self, message: m.ToWorker) -> None:
        self.received.append(message)
        match message:
            case m.Welcome(epoch):
                self.epoch = epoch
            case m.Reject(reason):
                self.rejected = reason
            case m.Prefill():
                self.prefills.append(message)
                self._held.append(message)
            case m.Release():
                self.releases.append(message)
                self._running.pop(message.request_id, None)
                self._held = [p for p in self._held if p.request_id != message.request_id]
                self._later = [
                    (at, said)
                    for at, said in self._later
                    if getattr(said, "request_id", "") != message.request_id
                ]
            case _:
                pass

    def _prefill(self, prompt: m.Prefill) -> None:
        key = (prompt.request_id, prompt.attempt, self.epoch)
        if self.script.fail is not None:
            self.say(m.Failed(*key, *self.script.fail, retriable=False))
            return
        whole = _Running(prompt, self.script, first_index=0)
        rows = [whole.next_row(choice, 1) for choice in prompt.choices]
        self.say(m.FirstToken(*key, tuple(rows), queued_s=0.001, prefill_s=0.002))
        unfinished = [row for row in rows if row.finish is None]
        if prompt.decode_worker_id is None:
            if unfinished:
                self._running[prompt.request_id] = whole
            return
        num_bytes = LAYOUT.token_bytes * len(prompt.token_ids) if unfinished else 0
        if unfinished:
            assert self.decoder is not None
            self.decoder._inbox.put(prompt)
        done_at = time.monotonic() + self.script.handover_after_s
        times = HANDOFF_TIMES if unfinished else None
        self._later.append((done_at, m.HandedOver(*key, num_bytes, times)))

    def _step(self) -> None:
        now = time.monotonic()
        for at, said in [one for one in self._later if one[0] <= now]:
            self._later.remove((at, said))
            self.say(said)
        due = [r for r in self._running.values() if r.due <= now]
        begun = tuple(one for running in due for one in running.begun())
        rows = [row for running in due for row in running.step(self.script.tokens_per_row)]
        if rows:
            self.num_tokens_sent += sum(len(row.tokens) for row in rows)
            self.say(m.Tokens(self.epoch, tuple(rows), begun))
        self._running = {k: r for k, r in self._running.items() if r.unfinished}

    def _hello(self) -> m.Hello:
        endpoints = ("tcp://127.0.0.1:9",) if self.role == "decode" else ()
        return m.Hello(
            self.worker_id, self.role, self._launch_id, 4242, "here", endpoints, self._facts
        )

    def _heartbeat(self) -> m.Heartbeat:
        stats = m.WorkerStats(
            num_blocks_total=self._facts.num_blocks,
            num_blocks_free=self._facts.num_blocks,
            num_requests_running=len(self._running),
        )
        return m.Heartbeat(self.worker_id, self.epoch, 0.0, stats)

    def _dealer(self, context: zmq.Context[zmq.Socket[bytes]], name: str) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.identity = name.encode()
        if self._keys is not None:
            apply_client(socket, self._keys)
        socket.connect(self._endpoint)
        return socket


class _Running:
    """One prompt being answered, all its choices."""

    def __init__(self, prompt: m.Prefill, script: Script, first_index: int) -> None:
        self._prompt, self._script = prompt, script
        self._is_new = first_index > 0
        self._next = {choice.choice_id: first_index for choice in prompt.choices}
        self.due = 0.0
        self._answers = {c.choice_id: script.answer(prompt, c) for c in prompt.choices}
        if first_index:  # what ended with its first token is not decoded
            for choice in prompt.choices:
                if finish_reason(prompt.sampling, self._token(choice, 0), 1):
                    del self._next[choice.choice_id]

    @property
    def unfinished(self) -> bool:
        return bool(self._next)

    def begun(self) -> Sequence[m.Begun]:
        """What is told of a hand-off with its first step."""
        is_new, self._is_new = self._is_new, False
        return [m.Begun(self._prompt.request_id, self._prompt.attempt, 0.004, 0.002)] * is_new

    def step(self, num_tokens: int) -> Sequence[m.TokenRow]:
        self.due = time.monotonic() + self._script.step_s
        choices = [c for c in self._prompt.choices if c.choice_id in self._next]
        return [self.next_row(choice, num_tokens) for choice in choices]

    def next_row(self, choice: m.Choice, num_tokens: int) -> m.TokenRow:
        first = self._next[choice.choice_id]
        tokens: list[int] = []
        finish = None
        while len(tokens) < num_tokens and finish is None:
            tokens.append(self._token(choice, first + len(tokens)))
            finish = finish_reason(self._prompt.sampling, tokens[-1], first + len(tokens))
        self._next[choice.choice_id] += len(tokens)
        if finish is not None:
            del self._next[choice.choice_id]
        asked = self._prompt.sampling.logprobs
        logprobs = None if asked is None else tuple(_logprobs(t, asked) for t in tokens)
        return m.TokenRow(
            self._prompt.request_id,
            self._prompt.attempt,
            choice.choice_id,
            first,
            tuple(tokens),
            logprobs,
            finish,
        )

    def _token(self, choice: m.Choice, index: int) -> int:
        answer = self._answers[choice.choice_id]
        return answer[index % len(answer)]


def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    others = [i for i in range(97, 97 + num_top + 1) if i != token_id]
    top = [(token_id, -0.25), *((i, -9999.0) for i in others)]
    return TokenLogprobs(-0.25, tuple(top[:num_top]))
