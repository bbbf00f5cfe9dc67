from __future__ import annotations

import dataclasses

import pytest

from splitserve.bench.outcome import Outcome
from splitserve.bench.report import analyze, distribution
from splitserve.bench.run import Run
from splitserve.bench.workloads import BenchSpec, MixedSpec

SPEC = BenchSpec(5, prompt_tokens=20, output_tokens=3, concurrency=3)
MIXED = MixedSpec(num_streams=1, undisturbed_s=2.0, duration_s=3.0)


def run_of(
    *outcomes: Outcome, spec: BenchSpec | MixedSpec = SPEC, client_cpu_share: float = 0.1
) -> Run:
    return Run(spec, outcomes, wall_s=2.0, client_cpu_share=client_cpu_share)


def test_report_is_arithmetic() -> None:
    spec = dataclasses.replace(SPEC, slo_ttft_s=1.0, slo_tpot_s=0.25)
    outcomes = [
        Outcome((0.5, 1.0, 1.1)),  # TPOT 0.3: too slow
        Outcome((0.5, 0.7, 0.9)),
        Outcome((2.0, 2.1, 2.2)),  # TTFT too slow
        Outcome((0.9,)),
        Outcome((), "lost"),
    ]
    report = analyze(run_of(*outcomes, spec=spec))
    assert (report.num_requests, report.num_completed, report.num_failed) == (5, 4, 1)
    assert report.errors == {"lost": 1}
    numbers = report.numbers
    assert (numbers["output_tokens"], numbers["output_tokens_per_s"]) == (10, 5.0)
    assert (numbers["num_within_slo"], numbers["goodput_per_s"]) == (2, 1.0)
    assert numbers["handoff_gap_p99_ms"] == pytest.approx(500)
    assert numbers["ttft_p50_ms"] == pytest.approx(500)
    assert numbers["ttft_max_ms"] == pytest.approx(2000)
    assert numbers["tpot_mean_ms"] == pytest.approx(200)


def test_percentiles_are_nearest_rank() -> None:
    values = distribution([value / 1000 for value in range(1, 101)])
    assert (values["p50"], values["p95"], values["p99"]) == (50.0, 95.0, 99.0)
    assert distribution([0.004]) == dict.fromkeys(("p50", "p95", "p99", "mean", "max"), 4.0)
    assert distribution([]) == {}


def test_a_client_that_is_late_or_busy_says_so() -> None:
    open_loop = dataclasses.replace(SPEC, concurrency=None, request_rate=2.0)
    late = [Outcome((0.5,), late_s=0.05), Outcome((0.5,), late_s=0.0)]
    report = analyze(run_of(*late, spec=open_loop))
    assert report.numbers["late_max_ms"] == pytest.approx(50)
    (warning,) = report.warnings
    assert "could not keep up" in warning and "worst 50 ms" in warning
    (warning,) = analyze(run_of(Outcome((0.5,)), client_cpu_share=0.95)).warnings
    assert "busy for 95%" in warning
    punctual = run_of(Outcome((0.5,), late_s=0.001), spec=open_loop)
    assert analyze(punctual).warnings == ()


def test_hidden_tokens_are_told() -> None:
    (warning,) = analyze(run_of(Outcome((1.0, 2.0, 2.0), num_hidden=1))).warnings
    assert "1 of 3 tokens" in warning


def test_prompts_from_a_cache_are_told() -> None:
    known = Outcome((1.0, 2.0), num_cached=16)
    (warning,) = analyze(run_of(known, known)).warnings
    assert "32 tokens of the prompts in a cache" in warning
    (warning,) = analyze(run_of(dataclasses.replace(known, kind="long"), spec=MIXED)).warnings
    assert "16 tokens of the prompts" in warning
    shared = dataclasses.replace(SPEC, shared_prefix_tokens=16)
    assert analyze(run_of(known, spec=shared)).warnings == ()
    sent_before = dataclasses.replace(known, num_cached=20)
    assert "4 tokens" in analyze(run_of(sent_before, spec=shared)).warnings[0]


def mixed_run(*, long: Outcome | None = None) -> Run:
    """Tokens of a stream every 0.5 s to 2.5, at 4.5 (a long prompt came between), then to 7."""
    times = (0.5, 1.0, 1.5, 2.0, 2.5, 4.5, 5.0, 5.5, 6.25, 7.0)
    stream = Outcome(times, kind="stream", ended_s=7.0)
    if long is None:
        long = Outcome((2.0, 3.5), kind="long", sent_s=2.0, ended_s=5.5, late_s=0.001)
    return run_of(stream, long, spec=MIXED)


def test_every_gap_of_a_stream_is_in_one_stretch() -> None:
    numbers = analyze(mixed_run()).numbers
    assert numbers["undisturbed_itl_max_ms"] == numbers["undisturbed_itl_p50_ms"] == 500
    assert numbers["stream_itl_p50_ms"] == 500
    assert numbers["stream_itl_p99_ms"] == numbers["stream_itl_max_ms"] == 2000
    assert numbers["stream_itl_mean_ms"] == pytest.approx(1000 * (0.5 + 2.0 + 0.5 + 0.5) / 4)
    assert numbers["after_itl_p50_ms"] == 750
    assert numbers["long_ttft_max_ms"] == 2000
    assert numbers["itl_p50_over_undisturbed"] == 1.0
    assert (numbers["num_streams"], numbers["num_long"]) == (1, 1)
    assert numbers["stream_tokens_per_s"] == pytest.approx(4 / 3.5)  # from 2.0 to 5.5 s


def test_streams_count_until_the_last_long_prompt_is_answered() -> None:
    late_answer = Outcome((4.5, 4.8), kind="long", sent_s=2.0, ended_s=6.8)
    numbers = analyze(mixed_run(long=late_answer)).numbers
    assert "after_itl_p50_ms" not in numbers
    assert numbers["stream_itl_mean_ms"] == pytest.approx(1000 * (7.0 - 2.0) / 6)


def test_failures_of_a_mixed_load_are_told_by_kind() -> None:
    lost = Outcome((), "HTTP 429: full", kind="long", sent_s=2.0, ended_s=2.1)
    report = analyze(mixed_run(long=lost))
    assert report.errors == {"long: HTTP 429: full": 1}
    assert "long_ttft_p50_ms" not in report.numbers
    assert report.numbers["stream_itl_max_ms"] == 2000
