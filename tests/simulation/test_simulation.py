"""Runs of chance, each from a seed, and whether the simulation would see what goes wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from coordinator.events import Action
from coordinator.registry import Worker
from coordinator.requests import Requests
from coordinator.token_order import Ordered, TokenOrder
from decode_worker.intake import Intake
from kv_transfer.receiver import StoreReceiver
from prefill_worker.scheduler import PrefillScheduler
from splitserve.errors import RequestFailedError
from splitserve.request import SampledToken
from splitserve.wire.messages import TokenRow
from tests.simulation.run import run_seed

SEEDS = [*range(16), 36, 93, 127, 149, 250, 269, 353]  # these failed once


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What the cluster logs of its own troubles is not what is looked at here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_request_ends_right_and_nothing_is_left(seed: int) -> None:
    run_seed(seed)


def test_a_seed_is_the_same_run_every_time() -> None:
    first: list[str] = []
    second: list[str] = []
    run_seed(1, first.append)
    run_seed(1, second.append)
    assert len(first) > 100
    assert first == second


# -- what the simulation has to see --------------------------------------------------------------


def _is_seen(text: str) -> bool:
    """Whether one of a few seeds, with a bug put in, fails with this text."""
    for seed in range(12):
        try:
            run_seed(seed)
        except BaseException as error:
            assert f"tests.simulation {seed}`" in error.__notes__[0]
            if text in f"{type(error).__name__}: {error}":
                return True
    return False


def test_it_sees_kv_that_was_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreReceiver, "_write", lambda *_: None)
    assert _is_seen("WrongKVRead")


def test_it_sees_blocks_that_stay_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefillScheduler, "release", lambda *_: None)
    assert _is_seen("holds blocks")


def test_it_sees_a_token_delivered_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode worker's first row repeats the prefill worker's token."""

    def take(order: TokenOrder, row: TokenRow) -> Ordered:
        order.finished = row.finish is not None
        return Ordered(tuple(map(SampledToken, row.tokens)), row.finish)

    monkeypatch.setattr(TokenOrder, "take", take)
    assert _is_seen(", not [")


def test_it_sees_a_loop_that_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Intake, "due", lambda _: 1.0)
    assert _is_seen("spins")


def test_it_sees_a_request_that_fails_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is told to leave fails what it has, instead of moving it."""

    def move_away(requests: Requests, worker: Worker, now: float) -> list[Action]:
        legs = requests.legs.at(worker)
        error = RequestFailedError("it was moved")
        return [action for leg in legs for action in requests.fail(leg.request_id, error, now)]

    monkeypatch.setattr(Requests, "move_away", move_away)
    assert _is_seen(": it was moved")
