from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from splitserve.bench import BenchSpec, MixedSpec, run_bench
from splitserve.bench.measure import Endpoint, measure
from splitserve.bench.workloads import warm_up_of
from splitserve.bench_http import post, target_of
from splitserve.errors import StreamBrokenError, UnavailableError
from tests.unit.scripted_server import Exchange, scripted_server

SPEC = BenchSpec(num_requests=8, prompt_tokens=20, output_tokens=5, concurrency=3)
OPEN = dataclasses.replace(SPEC, concurrency=None, request_rate=200.0)
MIXED = MixedSpec(
    num_streams=2,
    stream_prompt_tokens=4,
    stream_output_tokens=6,
    long_prompt_tokens=50,
    long_output_tokens=2,
    period_s=0.1,
    undisturbed_s=0.1,
    duration_s=0.25,
)


def answer(exchange: Exchange, before_the_end: Callable[[], None] = lambda: None) -> None:
    """As many one-token chunks as asked for, the second one late; then usage."""
    exchange.start_stream()
    for index in range(exchange.body["max_tokens"]):
        if index == 1:
            time.sleep(0.02)
        exchange.event({"choices": [{"index": 0, "text": "x", "token_ids": [5]}]})
    usage = {"prompt_tokens": 20, "completion_tokens": exchange.body["max_tokens"]}
    exchange.event({"choices": [], "usage": usage})
    before_the_end()
    exchange.event("[DONE]")
    exchange.end()


def test_closed_loop_counts_what_came() -> None:
    done: list[None] = []
    slots = threading.Semaphore(3)

    def answer_three_at_a_time(exchange: Exchange) -> None:
        assert slots.acquire(blocking=False), "a fourth client"
        answer(exchange, slots.release)

    with scripted_server(answer_three_at_a_time) as server:
        report = asyncio.run(
            run_bench(SPEC, server.base_url, "m", "key", lambda: done.append(None))
        )
        assert {e.headers["authorization"] for e in server.exchanges} == {"Bearer key"}
    numbers = report.numbers
    assert (report.num_completed, numbers["output_tokens"], report.errors) == (8, 40, {})
    assert len(done) == 8
    assert numbers["handoff_gap_p50_ms"] >= 20
    assert numbers["tpot_p50_ms"] >= 5
    assert numbers["itl_p99_ms"] >= 20 > numbers["itl_p50_ms"]
    assert numbers["output_tokens_per_s"] == pytest.approx(40 / numbers["wall_s"])


def test_open_loop_sends_whatever_the_server_does() -> None:
    all_here = threading.Barrier(OPEN.num_requests)

    def answer_when_all_have_come(exchange: Exchange) -> None:
        all_here.wait(10)
        answer(exchange)

    spec = dataclasses.replace(OPEN, slo_ttft_s=60.0)
    with scripted_server(answer_when_all_have_come) as server:
        report = asyncio.run(run_bench(spec, server.base_url, "m"))
    assert report.num_completed == report.numbers["num_within_slo"] == 8
    assert report.numbers["late_max_ms"] >= 0


def test_mixed_load_sends_streams_and_long_prompts() -> None:
    with scripted_server(answer) as server:
        report = asyncio.run(run_bench(MIXED, server.base_url, "m"))
        prompts = [exchange.body["prompt"] for exchange in server.exchanges]
        asked = Counter((len(e.body["prompt"]), e.body["max_tokens"]) for e in server.exchanges)
    assert report.errors == {}
    assert set(asked) == {(4, 6), (50, 2)}
    assert (asked[50, 2], report.numbers["num_long"]) == (3, 3)
    assert asked[4, 6] == report.numbers["num_streams"] > 2
    assert len({tuple(prompt[:4]) for prompt in prompts}) == len(prompts)
    assert report.numbers["output_tokens"] == 3 * 2 + asked[4, 6] * 6
    assert {"undisturbed_itl_p50_ms", "stream_itl_p99_ms"} <= set(report.numbers)


def test_mixed_load_waits_for_the_last_long_prompt() -> None:
    held = threading.Event()

    def hold_long_prompts(exchange: Exchange) -> None:
        if len(exchange.body["prompt"]) == 50:
            assert held.wait(10)
        elif len(server.exchanges) > 40:  # streams went on long after the time was over
            held.set()
        answer(exchange)

    with scripted_server() as server:
        server.handler = hold_long_prompts
        report = asyncio.run(run_bench(MIXED, server.base_url, "m"))
    assert (report.errors, report.numbers["num_long"]) == ({}, 3)


def test_mixed_load_does_not_flood_a_server_that_refuses() -> None:
    with scripted_server(broken("refused")) as server:
        report = asyncio.run(run_bench(MIXED, server.base_url, "m"))
    assert (report.num_requests, report.num_completed) == (5, 0)
    assert sum(n for cause, n in report.errors.items() if cause.startswith("stream: HTTP 429")) == 2


def test_warm_up_is_sent_first_and_not_counted() -> None:
    with scripted_server(answer) as server:
        endpoint = Endpoint(server.base_url, "m")
        sent_before: list[int] = []
        measured = asyncio.run(
            measure(
                SPEC,
                warm_up_of(SPEC, 2),
                endpoint,
                on_warm=lambda: sent_before.append(len(server.exchanges)),
            )
        )
        assert (sent_before, len(server.exchanges)) == ([2], 10)
    assert measured.report.num_requests == len(measured.run.outcomes) == 8


def test_warm_up_that_fails_is_told() -> None:
    def refuse_the_first(exchange: Exchange) -> None:
        (broken("refused") if len(server.exchanges) == 1 else answer)(exchange)

    with scripted_server() as server:
        server.handler = refuse_the_first
        measured = asyncio.run(measure(SPEC, warm_up_of(SPEC, 1), Endpoint(server.base_url, "m")))
    ((cause, number),) = measured.report.errors.items()
    assert number == measured.report.num_failed == 1
    assert cause.startswith("warm-up: HTTP 429")


def broken(kind: str) -> Any:
    def handler(exchange: Exchange) -> None:
        if kind == "refused":
            exchange.json({"error": {"message": "queue full"}}, 429)
            return
        exchange.start_stream()
        exchange.event({"choices": [{"index": 0, "text": "x"}]})
        if kind == "error event":
            exchange.event({"error": {"message": "worker died"}})
        if kind == "cut":
            exchange.http.close_connection = True
            return
        exchange.end()

    return handler


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("refused", "HTTP 429"),
        ("error event", "error event: worker died"),
        ("cut", "the reply was cut"),
        ("unmarked", "cut without [DONE]"),
    ],
)
def test_failures_are_counted_by_cause(kind: str, cause: str) -> None:
    with scripted_server(broken(kind)) as server:
        report = asyncio.run(run_bench(SPEC, server.base_url, "m"))
    assert report.num_completed == 0
    (found,) = report.errors
    assert cause in found
    assert report.errors[found] == 8
    assert "ttft_p50_ms" not in report.numbers


def test_lean_reader_knows_who_is_not_there() -> None:
    async def main() -> None:
        with pytest.raises(UnavailableError):
            await post(target_of("http://127.0.0.1:9", "/x", None), {}, 5)

        async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"this is not HTTP")
            writer.close()
            await reader.read()

        server = await asyncio.start_server(babble, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(StreamBrokenError):
            await post(target_of(f"http://127.0.0.1:{port}", "/x", None), {}, 5)
        server.close()

    asyncio.run(main())


def test_targets() -> None:
    target = target_of("https://example.org/base/v1", "/v1/completions", None)
    assert (target.host, target.port, target.tls) == ("example.org", 443, True)
    assert target.path == "/base/v1/completions"
