"""Chaos: processes are killed, stopped and told to leave at random, while clients go on asking.

Every request has to end, with the right tokens or with an error that says so. In the end nothing
is left of all that died: no process, block, file descriptor or memory.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.faulty import FaultyRing, processes_of, tiny_faulty
from tests.cluster.load import Asked, Load, questions

EVERY_S = 3.0
NUM_CLIENTS = 8
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
COORDINATOR_SHARE = 0.05  # of the strikes
LAST_ONE_SHARE = 0.1  # of the strikes that may hit the last decode worker
LONGEST_S = 30.0  # the deadline of each request
GROWTH_BYTES = 64 << 20  # of the memory of a process, over what one that has just started has
GROWTH_FDS = 40
FLAGS = {"prefill": 2, "decode": 2, "request_timeout_s": LONGEST_S}


@dataclass(frozen=True, slots=True)
class Strike:
    """One signal, and for the coordinator until when it was away."""

    victim: str
    number: signal.Signals
    at: float
    back_at: float = float("inf")


@dataclass(slots=True)
class Report:
    """What chaos has come to."""

    strikes: list[Strike] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    uses: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        verdicts = Counter(one.verdict for one in self.asked)
        struck = Counter(f"{s.number.name} {s.victim.split('-')[0]}" for s in self.strikes)
        share = verdicts["right"] / max(1, len(self.asked))
        errors = Counter(
            _gist(one.outcome.message) for one in self.asked if one.verdict not in ("right",)
        )
        return [
            f"strikes: {len(self.strikes)} ({dict(struck)})",
            f"requests: {len(self.asked)}, {dict(verdicts)}; availability {100 * share:.2f} %",
            f"slowest right answer: {self._slowest():.2f} s",
            *(f"{number:5} x {text}" for text, number in errors.most_common(12)),
            *self.uses,
            *(f"FAULT {fault}" for fault in self.faults),
        ]

    def _slowest(self) -> float:
        return max((x.took_s for x in self.asked if x.verdict == "right"), default=0.0)


def run(duration_s: float, seed: int = 0) -> Report:
    """Chaos for so long, on a cluster of its own."""
    chance, report = random.Random(seed), Report()
    with tiny_faulty(**FLAGS) as ring:
        in_peace = questions(ring.base_url)
        ring.assert_drained()
        before = use_of(ring)
        ring.pace.write(decode_step_s=0.003)
        with Load(ring.base_url, in_peace, NUM_CLIENTS, seed) as load, _watched(ring) as away:
            until = time.monotonic() + duration_s
            while time.monotonic() < until:
                strike = _strike(ring, chance)
                report.strikes += [strike] if strike is not None else []
                time.sleep(EVERY_S)
        ring.wait_whole()
        report.asked = load.asked
        report.strikes = [_until_back(strike, away) for strike in report.strikes]
        report.faults = [fault for one in load.asked if (fault := _fault_of(one, report.strikes))]
        _look_for_leaks(ring, before, report)
    return report


def _strike(ring: FaultyRing, chance: random.Random) -> Strike | None:
    """Signal a process of chance; None when there is nobody to be hit now."""
    number = chance.choice(SIGNALS)
    if chance.random() < COORDINATOR_SHARE:
        return _send("coordinator", ring.coordinator_pid(), number)
    ready = [w for w in ring.cluster()["workers"] if w["state"] == "ready"]
    decoders = [w for w in ready if w["role"] == "decode"]
    if len(decoders) < 2 and chance.random() >= LAST_ONE_SHARE:
        ready = [w for w in ready if w["role"] == "prefill"]
    if not ready:
        return None
    worker = chance.choice(ready)
    return _send(worker["worker_id"], worker["pid"], number)


def _send(victim: str, pid: int, number: signal.Signals) -> Strike | None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it went by itself since it was looked up
        return None
    return Strike(victim, number, time.monotonic())


@contextmanager
def _watched(ring: FaultyRing) -> Iterator[list[tuple[float, int]]]:
    """Collects when a coordinator answered, and which."""
    seen: list[tuple[float, int]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            pid = ring.coordinator_pid()
            seen.append((time.monotonic(), pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def _until_back(strike: Strike, seen: list[tuple[float, int]]) -> Strike:
    """When another coordinator answered after a strike."""
    if strike.victim != "coordinator":
        return strike
    before = [pid for at, pid in seen if at <= strike.at]
    after = [at for at, pid in seen if at > strike.at and pid not in before]
    return dataclasses.replace(strike, back_at=min(after, default=float("inf")))


def _fault_of(one: Asked, strikes: list[Strike]) -> str:
    """What is wrong with how a request ended; empty when nothing is.

    A connection may break only while the coordinator is away.
    """
    outcome, started = one.outcome, one.outcome.ended_at - one.took_s
    if one.took_s > LONGEST_S + 5:
        return f"ended after {one.took_s:.1f} s: {outcome}"
    if one.verdict in ("wrong", "neat"):
        return f"{one.verdict}: {one.question.body} gave {outcome.token_ids}"
    if "took longer" in outcome.message:
        return f"forgotten until its deadline: {outcome}"
    if one.verdict == "error":
        clear = bool(outcome.message) and (outcome.status == 200 or outcome.status >= 500)
        return "" if clear else f"not clear: {outcome.status} {outcome.message!r}"
    if one.verdict == "broken":
        coordinator = [s for s in strikes if s.victim == "coordinator"]
        excused = any(s.at <= outcome.ended_at and started <= s.back_at for s in coordinator)
        return "" if excused else f"broken without a cause: {outcome.message}"
    return ""


def _gist(message: str) -> str:
    """A message without what differs from one to the next."""
    return "".join("#" if letter.isdigit() else letter for letter in message)[:110]


@dataclass(frozen=True, slots=True)
class Use:
    """What one process has of the machine."""

    name: str
    num_fds: int
    rss_bytes: int


def use_of(ring: FaultyRing) -> dict[str, Use]:
    """Of each process of a cluster, by role; the largest of each, and this one's descriptors."""
    state = ring.cluster()
    processes = [("coordinator", state["coordinator"]["pid"])]
    processes += [(w["role"], w["pid"]) for w in state["workers"] if w["state"] == "ready"]
    found: dict[str, Use] = {}
    for name, pid in [*processes, ("launcher", os.getpid())]:
        fds = len(os.listdir(f"/proc/{pid}/fd"))
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        rss = pages * os.sysconf("SC_PAGE_SIZE")
        last = found.get(name, Use(name, 0, 0))
        found[name] = Use(name, max(fds, last.num_fds), max(rss, last.rss_bytes))
    return found


def _look_for_leaks(ring: FaultyRing, before: dict[str, Use], report: Report) -> None:
    try:
        ring.assert_drained()
    except AssertionError as error:
        report.faults.append(str(error))
    alive = {ring.coordinator_pid(), *(w["pid"] for w in ring.cluster_alive())}
    if left := set(processes_of(str(ring.pace.directory))) - alive:
        report.faults.append(f"processes that nobody speaks of: {left}")
    for name, now in use_of(ring).items():
        then = before[name]
        report.uses.append(
            f"{name}: {then.num_fds} -> {now.num_fds} descriptors, "
            f"{then.rss_bytes >> 20} -> {now.rss_bytes >> 20} MiB"
        )
        if now.num_fds > then.num_fds + GROWTH_FDS:
            report.faults.append(f"{name} has {now.num_fds} descriptors, had {then.num_fds}")
        if now.rss_bytes > then.rss_bytes + GROWTH_BYTES:
            report.faults.append(f"{name} grew by {(now.rss_bytes - then.rss_bytes) >> 20} MiB")
