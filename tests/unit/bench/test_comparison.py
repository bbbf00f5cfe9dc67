from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from benchmarks.comparison import Comparison, Turn, document, in_turn, report_text, turn_text
from benchmarks.servers import Server
from splitserve.bench.measure import Measured
from splitserve.bench.report import Report
from splitserve.bench.run import Run
from splitserve.bench.workloads import WORKLOADS

W1, W3 = WORKLOADS["w1"], WORKLOADS["w3"]
A, B = Server("a", "http://a", api_key="secret"), Server("b", "http://b", ("serve", "b"))


def turn(server: Server, repeat: int, rate: float, errors: Mapping[str, int] | None = None) -> Turn:
    numbers = {"output_tokens_per_s": rate, "ttft_p50_ms": 1000 / rate, "wall_s": 1.0}
    report = Report(32, 32 - sum((errors or {}).values()), numbers, errors or {})
    return Turn(server.name, repeat, Measured(Run(W1, (), 1.0, 0.1), report))


def compared(*turns: Turn) -> Comparison:
    return Comparison("w1", W1, (A, B), turns)


def test_servers_take_turns_there_and_back() -> None:
    assert [in_turn("abc", repeat) for repeat in range(3)] == [
        ["a", "b", "c"],
        ["c", "b", "a"],
        ["a", "b", "c"],
    ]


def test_ratios_pair_the_turns_of_a_repeat_in_any_order() -> None:
    comparison = compared(turn(A, 0, 10), turn(B, 0, 15), turn(B, 1, 40), turn(A, 1, 20))
    ratio = comparison.ratios(B)["output_tokens_per_s"]
    assert (ratio.low, ratio.median, ratio.high) == (1.5, 1.75, 2.0)
    text = report_text(comparison)
    assert "15.0 (10.0..20.0)" in text and "27.5 (15.0..40.0)" in text
    assert "b / a" in text and "1.75 (1.50..2.00)" in text
    assert "Not all went well" not in text


def test_tables_are_markdown_with_straight_columns() -> None:
    table, _, ratios = report_text(compared(turn(A, 0, 10), turn(B, 0, 15))).partition("\n\n")
    for lines in (table.splitlines(), ratios.splitlines()):
        assert len({len(line) for line in lines}) == 1
        assert set(lines[1]) == {"|", "-", " "}


@pytest.mark.parametrize("failed", [A, B])
def test_a_failure_leaves_a_hole_and_is_told(failed: Server) -> None:
    lost = Turn(failed.name, 1, None, "it exited with code 1; the last it said:\nno memory")
    other = B if failed is A else A
    comparison = compared(turn(A, 0, 10), turn(B, 0, 20), turn(other, 1, 70), lost)
    ratio = comparison.ratios(B)["output_tokens_per_s"]
    assert (ratio.median, ratio.num_values) == (2.0, 1)
    text = report_text(comparison)
    assert f"{failed.name} (1 of 2 runs)" in text
    assert "no memory" in text
    assert not lost.is_clean


def test_failed_requests_are_told_with_the_turn_and_at_the_end() -> None:
    bad = turn(A, 0, 10, {"HTTP 429: full": 3})
    assert not bad.is_clean
    assert "ERROR: 3 x HTTP 429: full" in turn_text(bad, 1, W1)
    assert "ERROR: 3 x HTTP 429: full" in report_text(compared(bad, turn(B, 0, 15)))


def test_runs_with_failures_are_in_no_median_and_no_ratio() -> None:
    fast_half = turn(B, 1, 900, {"HTTP 500: slow": 16})
    comparison = compared(turn(A, 0, 10), turn(B, 0, 20), turn(A, 1, 10), fast_half)
    rate, ratio = (
        found["output_tokens_per_s"] for found in (comparison.numbers(B), comparison.ratios(B))
    )
    assert (rate.high, rate.num_values) == (20, 1)
    assert (ratio.high, ratio.num_values) == (2, 1)
    assert document(comparison)["turns"][3]["is_clean"] is False
    medians, ratios, _ = report_text(comparison).split("\n\n")
    for table in (medians, ratios):
        assert "runs with failures left out" in table.splitlines()[0]
    assert "b (1 of 2 runs)" in medians
    assert "left out" not in report_text(compared(turn(A, 0, 10), turn(B, 0, 20)))


def test_others_at_work_while_measured_are_told() -> None:
    beside = dataclasses.replace(turn(A, 0, 10), busy_others=0.31)
    assert "WARNING: others used 31% of the machine" in turn_text(beside, 1, W1)
    assert "WARNING: others used 31%" in report_text(compared(beside, turn(B, 0, 15)))
    alone = dataclasses.replace(turn(A, 0, 10), busy_others=0.1)
    assert "WARNING" not in turn_text(alone, 1, W1) and not alone.is_doubtful


def test_a_busy_machine_is_told() -> None:
    busy = dataclasses.replace(turn(A, 0, 10), busy_before=0.45)
    assert "WARNING: 45% of the machine was in use" in turn_text(busy, 1, W1)
    assert "WARNING: 45% of the machine" in report_text(compared(busy, turn(B, 0, 15)))
    assert busy.is_clean


def test_a_turn_that_broke_after_it_was_measured_shows_both() -> None:
    whole = turn(A, 0, 10)
    broke = Turn("a", 0, whole.measured, "a is not gone")
    text = turn_text(broke, 1, W1)
    assert "output tokens/s 10.0" in text and "FAILED: a is not gone" in text


def test_mixed_loads_show_their_own_numbers() -> None:
    numbers = {"stream_itl_p99_ms": 50.0, "long_ttft_max_ms": 900.0, "client_cpu_share": 0.1}
    measured = Measured(Run(W3, (), 1.0, 0.1), Report(9, 9, numbers, {}))
    text = report_text(Comparison("w3", W3, (A,), (Turn("a", 0, measured),)))
    assert "ITL of streams p99, ms" in text and "TTFT of long prompts max, ms" in text


def test_the_file_has_everything_but_keys() -> None:
    lost = Turn("b", 1, None, "gone")
    found = document(compared(turn(A, 0, 10), turn(B, 0, 15), turn(A, 1, 10), lost))
    assert found["numbers"]["a"]["output_tokens_per_s"]["num_values"] == 2
    assert found["ratios"]["b"]["output_tokens_per_s"]["median"] == 1.5
    assert [(t["server"], t["repeat"]) for t in found["turns"]] == [
        ("a", 0),
        ("b", 0),
        ("a", 1),
        ("b", 1),
    ]
    assert found["turns"][3]["failure"] == "gone"
    assert found["servers"][1]["command"] == ["serve", "b"]
    assert "secret" not in str(found)
