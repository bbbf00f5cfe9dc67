"""A data channel that delays, drops, reorders, cuts and spoils: answers stay right."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from coordinator.tracked import MAX_FAILURES
from splitserve.wire import messages as m
from tests.cluster.clients import Outcome, ask, plain, prompt
from tests.cluster.faulty import FaultyRing, tiny_faulty
from tests.cluster.harness import Body
from tests.cluster.shim import Parts, Shim, pass_on

pytestmark = [pytest.mark.breaking, pytest.mark.usefixtures("calm")]

STALL_S = 1.0
NUM_REQUESTS = 4
FLAGS = {"prefill": 1, "decode": 1, "stall_timeout_s": STALL_S}
Moves = Sequence[tuple[float, Parts]]


@pytest.fixture(scope="module")
def shared_ring(shim: Shim) -> Iterator[FaultyRing]:
    with tiny_faulty(around=shim.between, **FLAGS) as ring:
        yield ring


@pytest.fixture(scope="module")
def right(shared_ring: FaultyRing) -> list[tuple[int, ...]]:
    return [ask(shared_ring.base_url, body).token_ids for body in bodies()]


def bodies() -> list[Body]:
    return [
        plain(n, prompt=prompt(n, 120 + n), max_tokens=12, stream=n % 2 == 0)
        for n in range(NUM_REQUESTS)
    ]


class Spoil:
    """A rule for the first `number` messages of a kind of each request; others are passed on."""

    def __init__(self, kind: type, spoil: Callable[[Parts], Moves], number: int = 1) -> None:
        self.num_spoilt = 0
        self._kind = kind
        self._spoil = spoil
        self._number = number
        self._seen: Counter[str] = Counter()

    def __call__(self, message: m.Message, parts: Parts) -> Moves:
        if not isinstance(message, self._kind):
            return [(0.0, parts)]
        request_id: str = vars_of(message)["request_id"]
        self._seen[request_id] += 1
        if self._seen[request_id] > self._number:
            return [(0.0, parts)]
        self.num_spoilt += 1
        return self._spoil(parts)


def vars_of(message: m.Message) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}


def start_of(region: m.Region) -> tuple[int, int]:
    return region.layer_start, region.token_start


def drop(_: Parts) -> Moves:
    return []


def ask_all(ring: FaultyRing) -> tuple[list[Outcome], float]:
    """Answers to all requests at once, and how long the last one took."""
    started = time.monotonic()
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        outcomes = list(pool.map(lambda body: ask(ring.base_url, body), bodies()))
    return outcomes, time.monotonic() - started


def assert_all_right(ring: FaultyRing, right: list[tuple[int, ...]], limit_s: float) -> None:
    outcomes, took_s = ask_all(ring)
    assert [str(outcome) for outcome in outcomes] == ["whole"] * NUM_REQUESTS
    assert [outcome.token_ids for outcome in outcomes] == right
    assert took_s < limit_s
    ring.assert_drained()
    assert ring.is_whole(), "a worker died of it"


def test_a_slow_channel_costs_time_only(
    ring: FaultyRing, shim: Shim, right: list[tuple[int, ...]]
) -> None:
    """Everything comes a third of a second late, in order."""
    num_restarts = ring.cluster()["coordinator"]["num_restarts"]
    shim.rule = lambda _, parts: [(0.3, parts)]
    assert_all_right(ring, right, limit_s=5)
    assert ring.cluster()["coordinator"]["num_restarts"] == num_restarts


def test_frames_out_of_order_and_behind_their_commit_are_put_right(
    ring: FaultyRing, shim: Shim, right: list[tuple[int, ...]]
) -> None:
    """LMCache/LMCache #1350: decode looked for KV before it was there, and failed.

    Each frame comes up to half a second late. Nothing is sent twice.
    """
    chance, asked_again = random.Random(5), set()
    num_restarts = ring.cluster()["coordinator"]["num_restarts"]

    def late(message: m.Message, parts: Parts) -> Moves:
        if isinstance(message, m.Incomplete):
            asked_again.add(message.request_id)
        return [(chance.uniform(0, 0.5) if isinstance(message, m.FrameHeader) else 0.0, parts)]

    shim.rule = late
    assert_all_right(ring, right, limit_s=5)
    assert not asked_again
    assert ring.cluster()["coordinator"]["num_restarts"] == num_restarts


def test_frames_that_come_twice_are_written_twice_and_harm_nothing(
    ring: FaultyRing, shim: Shim, right: list[tuple[int, ...]]
) -> None:
    shim.rule = lambda _, parts: [(0.0, parts), (0.05, parts)]
    assert_all_right(ring, right, limit_s=5)


@pytest.mark.parametrize("kind", [m.Open, m.Grant, m.FrameHeader, m.Commit, m.Received])
def test_a_dropped_message_costs_time_and_no_answer(
    ring: FaultyRing, shim: Shim, right: list[tuple[int, ...]], kind: type
) -> None:
    """vllm-project/vllm #35943, #55181: one lost message, and the request waited for ever.

    A lost frame is asked for again at once; whatever else is lost is noticed as a stall.
    """
    num_restarts = ring.cluster()["coordinator"]["num_restarts"]
    shim.rule = rule = Spoil(kind, drop)
    assert_all_right(ring, right, limit_s=2 if kind is m.FrameHeader else 2 * STALL_S + 2)
    assert rule.num_spoilt == NUM_REQUESTS
    if kind is m.FrameHeader:
        assert ring.cluster()["coordinator"]["num_restarts"] == num_restarts


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: [parts[0], parts[1][:-4]],
        lambda parts: [parts[0], bytes([parts[1][0] ^ 1]) + parts[1][1:]],
        lambda parts: [parts[0][:-3], parts[1]],
        lambda parts: [parts[0]],
    ],
    ids=["cut", "a bit flipped", "header cut", "no buffer"],
)
def test_a_spoilt_frame_is_never_written(
    ring: FaultyRing,
    shim: Shim,
    right: list[tuple[int, ...]],
    change: Callable[[Parts], Parts],
) -> None:
    """ai-dynamo/nixl PR#1493: failed transfers fell through to success."""
    before = ring.total("decode", "num_frames_dropped")
    shim.rule = Spoil(m.FrameHeader, lambda parts: [(0.0, change(parts))])
    assert_all_right(ring, right, limit_s=3)
    if len(change([b"0123", b"01234567"])) == 2 and change([b"0123", b"01234567"])[0] == b"0123":
        assert ring.total("decode", "num_frames_dropped") - before == NUM_REQUESTS


def test_a_frame_lost_twice_fails_its_attempt_and_the_next_one_is_right(
    ring: FaultyRing, shim: Shim, right: list[tuple[int, ...]]
) -> None:
    """vllm-project/vllm PR#50754: no terminal state on the way of a failed transfer."""
    regions: Counter[tuple[str, int]] = Counter()

    def lose_first_region_twice(message: m.Message, parts: Parts) -> Moves:
        if isinstance(message, m.FrameHeader) and start_of(message.region) == (0, 0):
            regions[message.request_id, message.attempt] += 1
            if message.attempt == 0 and regions[message.request_id, 0] <= 2:
                return []
        return [(0.0, parts)]

    shim.rule = lose_first_region_twice
    num_restarts = ring.cluster()["coordinator"]["num_restarts"]
    assert_all_right(ring, right, limit_s=2 * STALL_S + 2)
    restarts = ring.cluster()["coordinator"]["num_restarts"] - num_restarts
    assert restarts == NUM_REQUESTS


def test_a_network_that_swallows_everything_ends_in_clear_errors(
    ring: FaultyRing, shim: Shim, right: list[tuple[int, ...]]
) -> None:
    """vllm-project/vllm PR#26171: a handshake that failed left its request waiting for ever."""
    shim.rule = lambda _, parts: []
    started = time.monotonic()
    outcomes, took_s = ask_all(ring)
    for outcome in outcomes:
        assert outcome.kind == "error"
        assert outcome.message
    assert took_s < MAX_FAILURES * (STALL_S + 1), f"{time.monotonic() - started:.1f} s"
    shim.rule = pass_on
    assert_all_right(ring, right, limit_s=3)
