"""Measuring a machine once: what is kept, for whom, and what happens when it can't be."""

from __future__ import annotations

import fcntl
import json
import logging
import threading
import time
from pathlib import Path
from typing import TextIO

import pytest
import torch

from splitserve.engine import ceilings as module
from splitserve.engine.ceilings import (
    Achieved,
    cache_path,
    ceilings,
    keep_achieved,
    measure,
)
from splitserve.work import Ceilings

DTYPE = torch.float32


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of this test's own, and measurements of milliseconds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_COPY_BYTES", 1 << 16)
    monkeypatch.setattr(module, "_COPY_S", 0.0)
    monkeypatch.setattr(module, "_MATMUL_SIZES", (64,))
    monkeypatch.setattr(module, "_MATMUL_S", 0.0)


def ask(dtype: torch.dtype = DTYPE) -> Ceilings:
    return ceilings(dtype, torch.get_num_threads(), "cpu")


def keep(found: Ceilings, num_starts: int = module._NUM_STARTS, age_s: float = 60.0) -> None:
    """Put other numbers, that nobody measures, in the place of what is kept of the only key."""
    [key] = json.loads(cache_path().read_text())
    values = {"bytes_per_s": found.bytes_per_s, "flops_per_s": found.flops_per_s}
    kept = {"ceilings": values, "num_starts": num_starts, "measured_at": time.time() - age_s}
    cache_path().write_text(json.dumps({key: kept}))


def age(age_s: float) -> None:
    """What is kept was measured so long ago."""
    kept = json.loads(cache_path().read_text())
    for value in kept.values():
        value["measured_at"] = time.time() - age_s
    cache_path().write_text(json.dumps(kept))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_measured_is_no_nonsense(dtype: torch.dtype) -> None:
    """No CPU is faster than this; a loaded one can be as slow as it likes."""
    found = measure(dtype)
    assert 0 < found.bytes_per_s < 1e14
    assert 0 < found.flops_per_s < 1e16


def test_the_best_of_the_first_starts_is_kept() -> None:
    """Workers that start together find too little; what they found is not the last word."""
    ask()
    keep(Ceilings(1.0, 1e18), num_starts=1)
    found = ask()
    assert found.bytes_per_s > 1.0 and found.flops_per_s == 1e18
    [kept] = json.loads(cache_path().read_text()).values()
    assert kept["num_starts"] == 2


def test_after_the_first_starts_nothing_is_measured() -> None:
    for _ in range(module._NUM_STARTS):
        ask()
    assert ask() == ask()
    keep(Ceilings(1.0, 2.0))
    assert ask() == Ceilings(1.0, 2.0)
    names = {path.name for path in cache_path().parent.iterdir()}
    assert names == {cache_path().name, cache_path().with_suffix(".lock").name}


@pytest.mark.parametrize("age_s", [8 * 86_400.0, -86_400.0], ids=["old", "of a clock set back"])
def test_old_ones_are_measured_again_and_the_best_is_kept(age_s: float) -> None:
    """The machine may have been busy at all of the first starts."""
    ask()
    keep(Ceilings(1.0, 1e18), age_s=age_s)
    found = ask()
    assert found.bytes_per_s > 1.0 and found.flops_per_s == 1e18
    keep(Ceilings(1.0, 2.0))
    assert ask() == Ceilings(1.0, 2.0), "once a week"


def test_a_file_without_dates_is_old() -> None:
    ask()
    [(key, value)] = json.loads(cache_path().read_text()).items()
    kept = {"ceilings": {**value["ceilings"], "flops_per_s": 1e18}, "num_starts": 9}
    cache_path().write_text(json.dumps({key: kept}))
    assert ask().flops_per_s == 1e18
    [kept] = json.loads(cache_path().read_text()).values()
    assert kept["num_starts"] == 10 and kept["measured_at"] > 0


def achieve(achieved: Ceilings) -> Ceilings:
    """What the next one to start gets, of ceilings that are settled."""
    keep_achieved(achieved, DTYPE, torch.get_num_threads(), "cpu")
    return ask()


def test_what_a_worker_achieved_is_kept() -> None:
    ask()
    keep(Ceilings(10.0, 10.0))
    assert achieve(Ceilings(9.0, 11.0)) == Ceilings(10.0, 11.0)
    assert achieve(Ceilings(12.0, 5.0)) == Ceilings(12.0, 11.0)
    [kept] = json.loads(cache_path().read_text()).values()
    assert kept["num_starts"] == module._NUM_STARTS, "it is no start"


def test_what_is_measured_a_week_later_replaces_what_was_achieved() -> None:
    """One odd window must not be the roof for good."""
    ask()
    keep(Ceilings(1.0, 1.0))
    assert achieve(Ceilings(1e17, 1e17)) == Ceilings(1e17, 1e17)
    age(8 * 86_400.0)
    found = ask()
    assert 1.0 < found.bytes_per_s < 1e17 and 1.0 < found.flops_per_s < 1e17
    assert ask() == found


def test_what_was_achieved_outlives_the_other_first_starts() -> None:
    ask()
    keep(Ceilings(1.0, 1.0), num_starts=1)
    keep_achieved(Ceilings(1e17, 1e17), DTYPE, torch.get_num_threads(), "cpu")
    assert ask() == Ceilings(1e17, 1e17)


def test_who_achieved_something_waits_for_nobody_and_warns_of_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is a worker in the midst of its work, and the ceilings are kept as before."""
    ask()
    keep(Ceilings(1.0, 1.0))
    with cache_path().with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert achieve(Ceilings(2.0, 2.0)) == Ceilings(1.0, 1.0)
    assert not caplog.records


def test_what_was_achieved_and_cant_be_written_is_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ask()
    keep(Ceilings(1.0, 1.0))
    cache_path().with_suffix(".partial").mkdir()
    assert achieve(Ceilings(2.0, 2.0)) == Ceilings(1.0, 1.0)
    [warning] = caplog.records
    assert "achieved" in warning.getMessage() and "each start" not in warning.getMessage()


class Loop:
    """A worker's, on a clock of our own, and what it had kept."""

    def __init__(self, weight_bytes: int = 1 << 30) -> None:
        self.now = 5.0
        self.kept: list[Ceilings] = []
        self.achieved = Achieved(
            Ceilings(100.0, 100.0), weight_bytes, self.kept.append, lambda: self.now
        )


def test_only_what_is_worth_it_is_kept_and_seldom() -> None:
    loop = Loop()
    loop.achieved.raised(Ceilings(101.0, 101.0))
    assert loop.kept == [], "too little"
    loop.achieved.raised(Ceilings(101.0, 103.0))
    loop.now += 59.0
    loop.achieved.raised(Ceilings(110.0, 103.0))
    assert loop.kept == [Ceilings(101.0, 103.0)], "too soon"
    loop.now += 2.0
    loop.achieved.raised(Ceilings(110.0, 104.0))
    assert loop.kept[1:] == [Ceilings(110.0, 104.0)]


def test_bytes_of_weights_that_fit_into_a_cache_are_not_kept() -> None:
    loop = Loop(module._COPY_BYTES - 1)
    loop.achieved.raised(Ceilings(200.0, 101.0))
    assert loop.kept == []
    loop.achieved.raised(Ceilings(200.0, 110.0))
    assert loop.kept == [Ceilings(100.0, 110.0)]


def test_another_dtype_and_another_number_of_threads_have_ceilings_of_their_own() -> None:
    ask()
    keep(Ceilings(1.0, 2.0))
    bf16 = ask(torch.bfloat16)
    assert bf16 != Ceilings(1.0, 2.0)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert ask() != Ceilings(1.0, 2.0)
    finally:
        torch.set_num_threads(before)
    assert ask() == Ceilings(1.0, 2.0)
    assert len(json.loads(cache_path().read_text())) == 3


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"half a f",
        b"[1, 2]",
        b'{"a": 1}',
        b'{"a": {"bytes_per_s": 0, "flops_per_s": 1}}',
        b'{"a": {"bytes_per_s": NaN, "flops_per_s": 1}}',
        b'{"a": {"bytes_per_s": "1", "flops_per_s": 1}}',
        b'{"a": {"ceilings": {"bytes_per_s": 1}, "num_starts": 1}}',
        b'{"a": {"ceilings": {"bytes_per_s": 0, "flops_per_s": 1}, "num_starts": 1}}',
        b'{"a": {"ceilings": {"bytes_per_s": NaN, "flops_per_s": 1}, "num_starts": 1}}',
        b'{"a": {"ceilings": {"bytes_per_s": 1, "flops_per_s": 1}, "num_starts": 1,'
        b' "achieved": {"bytes_per_s": 1}}}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_a_broken_file_is_written_anew(content: bytes) -> None:
    cache_path().parent.mkdir(parents=True)
    cache_path().write_bytes(content)
    found = ask()
    [kept] = json.loads(cache_path().read_text()).values()
    assert Ceilings(**kept["ceilings"]) == found


@pytest.mark.parametrize("in_the_way", ["cache", "cache/splitserve"])
def test_where_nothing_can_be_kept_there_is_one_warning(
    tmp_path: Path, in_the_way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A file is where a directory should be: root may write into any directory, but not there."""
    (tmp_path / in_the_way).parent.mkdir(exist_ok=True)
    (tmp_path / in_the_way).write_text("in the way")
    with caplog.at_level(logging.WARNING):
        assert ask().bytes_per_s > 0
    [warning] = caplog.records
    assert in_the_way in warning.getMessage()


def test_a_file_that_cant_be_replaced_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    cache_path().mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        assert ask().bytes_per_s > 0
    assert len(caplog.records) == 1


def test_who_finds_another_measuring_waits_and_takes_what_it_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask()
    keep(Ceilings(1.0, 2.0))
    found = cache_path().read_text()
    cache_path().unlink()
    refused = threading.Event()
    flock = fcntl.flock

    def watched(file: TextIO, operation: int) -> None:
        try:
            flock(file, operation)
        except BlockingIOError:
            refused.set()
            raise

    answers: list[Ceilings] = []
    asking = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    with cache_path().with_suffix(".lock").open("w") as lock:
        flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr("fcntl.flock", watched)
        asking.start()
        assert refused.wait(10.0)
        cache_path().write_text(found)
        assert not answers
    asking.join(10.0)
    assert answers == [Ceilings(1.0, 2.0)]


def test_who_is_stopped_while_measuring_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_LOCK_TIMEOUT_S", 0.0)
    cache_path().parent.mkdir(parents=True)
    with cache_path().with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert ask().bytes_per_s > 0
    assert not cache_path().exists()
    assert len(caplog.records) == 1 and "locked" in caplog.text
