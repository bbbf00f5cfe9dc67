from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from splitserve.profiling.collected import Profile
from splitserve.profiling.evidence import BOTTLENECKS
from splitserve.profiling.remedies import Remedy
from splitserve.profiling.table import profile_table
from splitserve.profiling.verdict import (
    MEANINGS,
    cluster_verdict,
    saturation,
    utilisation,
    worker_verdicts,
)
from tests.unit.profiling.profiles import profile_of
from tests.unit.profiling.recorded import DECODE_BOUND, PREFILL_BOUND, Load

ALONE = Load(prefill_wait_s=3.0, num_decoding=1)
AT_REST = Load(duration_s=0.01, requests_per_s=0.001)


def table_text(profile: Profile) -> str:
    workers = worker_verdicts(profile)
    text = io.StringIO()
    Console(width=200, file=text).print(profile_table(profile, workers, cluster_verdict(workers)))
    return text.getvalue()


@pytest.mark.parametrize(
    ("load", "binding", "headline"),
    [
        (PREFILL_BOUND, "prefill", "The prefill pool binds: compute"),
        (DECODE_BOUND, "decode", "The decode pool binds: memory"),
        (ALONE, "load", "Neither pool is at its limit"),
        (AT_REST, "nothing", "Nothing binds"),
    ],
)
def test_the_pool_that_binds_is_named(load: Load, binding: str, headline: str) -> None:
    verdict = cluster_verdict(worker_verdicts(profile_of(load)))
    assert verdict.binding == binding
    assert headline in verdict.headline
    assert (verdict.first is None) == (binding == "nothing")


def test_of_pools_that_are_both_at_a_limit_it_is_the_one_with_more_to_win() -> None:
    """Both have work all the time: how they differ in the rest of it says nothing."""
    prefill, decode = worker_verdicts(profile_of(PREFILL_BOUND))
    decode = dataclasses.replace(decode, bottleneck="memory", overall=prefill.overall)
    for gains, binding in (((2.0, 1.2), "prefill"), ((1.2, 2.0), "decode")):
        workers = [
            dataclasses.replace(
                worker, remedies=(Remedy("do it", gain, "", "both"),), bottleneck="memory"
            )
            for worker, gain in zip((prefill, decode), gains, strict=True)
        ]
        verdict = cluster_verdict(workers)
        assert (verdict.binding, verdict.advice.count("2.0 times")) == (binding, 1)
        assert "after that, there: do it (predicted: 1.2 times its tokens/s)" in verdict.why


def test_numbers_beyond_all_sense_are_no_reason_to_fail() -> None:
    """A share so large that nothing can be taken from it is as close to itself as any."""
    workers = [
        dataclasses.replace(
            worker,
            bottleneck="memory",
            overall=dataclasses.replace(worker.overall, wait_s=-1e30, window_s=1.0),
        )
        for worker in worker_verdicts(profile_of(PREFILL_BOUND))
    ]
    assert cluster_verdict(workers).binding in ("prefill", "decode")


def test_no_worker_at_all_is_no_reason_to_fail() -> None:
    profile = dataclasses.replace(profile_of(PREFILL_BOUND), workers=())
    assert cluster_verdict(worker_verdicts(profile)).binding == "nothing"


def test_waiting_for_kv_is_named_as_what_lies_between_the_pools() -> None:
    profile = profile_of(ALONE)
    decode = profile.workers[1]
    windows = tuple(
        dataclasses.replace(
            window,
            evidence=dataclasses.replace(
                window.evidence, kv_wait_s=0.6, forward_s=0.3, bottleneck="transfer"
            ),
        )
        for window in decode.windows
    )
    workers = (profile.workers[0], dataclasses.replace(decode, windows=windows))
    verdict = cluster_verdict(worker_verdicts(dataclasses.replace(profile, workers=workers)))
    assert verdict.binding == "transfer"
    assert "between the pools" in verdict.headline


def test_a_worker_has_the_class_of_most_of_its_windows_and_their_evidence() -> None:
    profile = profile_of(PREFILL_BOUND)
    decode = profile.workers[1]
    odd = dataclasses.replace(decode.windows[0].evidence, bottleneck="host", schedule_s=9.0)
    windows = (dataclasses.replace(decode.windows[0], evidence=odd), *decode.windows[1:])
    changed = dataclasses.replace(decode, windows=windows)
    verdict = worker_verdicts(dataclasses.replace(profile, workers=(changed,)))[0]
    assert verdict.bottleneck == "batching"
    assert (verdict.num_said_so, verdict.num_windows) == (len(windows) - 1, len(windows))
    assert verdict.evidence.schedule_s < 1.0 < verdict.overall.schedule_s


@pytest.mark.parametrize(
    ("num_cores", "hosts", "needs_machine"),
    [
        (3, ("a", "a"), False),
        (2, ("a", "a"), True),
        (2, ("a", "b"), False),  # each has one to spare
        (1, ("a", "b"), True),
        (0, ("a", "a"), False),  # not known
    ],
)
def test_spare_cores_are_those_of_the_workers_own_host(
    num_cores: int, hosts: tuple[str, str], needs_machine: bool
) -> None:
    profile = profile_of(PREFILL_BOUND)
    workers = tuple(
        dataclasses.replace(
            worker, facts=dataclasses.replace(worker.facts, host=host, num_cores=num_cores)
        )
        for worker, host in zip(profile.workers, hosts, strict=True)
    )
    prefill, _ = worker_verdicts(dataclasses.replace(profile, workers=workers))
    assert prefill.remedies[0].title == "more prefill workers: 1 to 2"
    assert ("another machine is needed" in prefill.remedies[0].arithmetic) == needs_machine


def test_presence_is_not_saturation() -> None:
    prefill, decode = worker_verdicts(profile_of(PREFILL_BOUND))
    assert utilisation(prefill.evidence) > 0.95
    assert saturation(prefill.evidence) == pytest.approx(0.85, abs=0.03)
    slow = dataclasses.replace(decode.evidence, forward_s=10 * decode.evidence.forward_s)
    assert saturation(slow) == pytest.approx(saturation(decode.evidence) / 10)


def test_every_class_has_a_meaning() -> None:
    assert set(MEANINGS) == set(BOTTLENECKS)


def test_the_table_says_it_all() -> None:
    text = table_text(profile_of(PREFILL_BOUND))
    for worker in worker_verdicts(profile_of(PREFILL_BOUND)):
        assert worker.facts.worker_id in text
        assert f"in {worker.num_said_so} of {worker.num_windows} windows" in text
        assert worker.remedies[0].title in text
    assert "utilisation 100 %, saturation 8" in text
    assert "The prefill pool binds: compute." in text
    assert "First: more prefill workers: 1 to 2" in " ".join(text.split())
    assert "note:" not in text


def test_the_table_takes_names_for_names_and_says_what_is_missing() -> None:
    profile = profile_of(PREFILL_BOUND, prefix="[red]$x$")
    profile = dataclasses.replace(profile, is_whole=False, num_dropped=5, num_unreadable=1)
    text = table_text(profile)
    assert "[red]$x$prefill-0-" in text
    assert "note: cut short: " in text
    assert "left out for lack of room: 5 entries" in text
    assert "unreadable lines: 1" in text
