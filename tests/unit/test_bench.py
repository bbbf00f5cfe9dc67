from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from splitserve.bench import (
    BenchSpec,
    Outcome,
    analyze,
    distribution,
    make_prompts,
    outcome_of,
    request_body,
    run_bench,
)
from splitserve.bench_http import RawReply, post, target_of
from splitserve.cli import app
from splitserve.errors import StreamBrokenError, UnavailableError
from tests.unit.scripted_server import Exchange, scripted_server

SPEC = BenchSpec(num_requests=8, prompt_tokens=20, output_tokens=5, concurrency=3)


def answer(exchange: Exchange) -> None:
    """As many one-token chunks as asked for, the second one late; then usage."""
    exchange.start_stream()
    for index in range(exchange.body["max_tokens"]):
        if index == 1:
            time.sleep(0.02)
        exchange.event({"choices": [{"index": 0, "text": "x", "token_ids": [5]}]})
    usage = {"prompt_tokens": 20, "completion_tokens": exchange.body["max_tokens"]}
    exchange.event({"choices": [], "usage": usage})
    exchange.event("[DONE]")
    exchange.end()


def test_prompts_are_seeded_share_a_prefix_and_avoid_special_ids() -> None:
    spec = dataclasses.replace(SPEC, shared_prefix_tokens=7, vocab_size=1500, seed=3)
    prompts = make_prompts(spec)
    assert prompts == make_prompts(spec)
    assert prompts != make_prompts(dataclasses.replace(spec, seed=4))
    assert {len(prompt) for prompt in prompts} == {20}
    assert len({tuple(prompt[:7]) for prompt in prompts}) == 1
    assert len({tuple(prompt[7:]) for prompt in prompts}) == 8
    assert all(1000 <= token < 1500 for prompt in prompts for token in prompt)


def test_requests_pin_the_amount_of_work() -> None:
    body = request_body(SPEC, "m", [1000, 1001])
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (5, 0, True)
    assert (body["stream"], body["prompt"]) == (True, [1000, 1001])


def test_closed_loop_counts_what_came() -> None:
    done: list[None] = []
    with scripted_server(answer) as server:
        report = asyncio.run(
            run_bench(SPEC, server.base_url, "m", "key", lambda: done.append(None))
        )
        assert server.most_open <= 3
        assert {e.headers["authorization"] for e in server.exchanges} == {"Bearer key"}
    assert (report.num_completed, report.output_tokens, report.errors) == (8, 40, {})
    assert len(done) == 8
    assert report.handoff_gap_ms["p50"] >= 20
    assert report.tpot_ms["p50"] >= 5
    assert report.itl_ms["p99"] >= 20 > report.itl_ms["p50"]
    assert report.output_tokens_per_s == pytest.approx(40 / report.wall_s)


def test_open_loop_keeps_its_schedule() -> None:
    spec = dataclasses.replace(SPEC, concurrency=None, request_rate=200.0, slo_ttft_s=5.0)
    with scripted_server(answer) as server:
        report = asyncio.run(run_bench(spec, server.base_url, "m"))
    assert report.num_completed == report.num_within_slo == 8


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
    assert report.ttft_ms == {}


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


def raw(*events: tuple[float, Any]) -> RawReply:
    reply = RawReply(200, sent_at=10.0)
    for at, event in events:
        text = event if isinstance(event, str) else json.dumps(event)
        reply.parts.append((at, f"data: {text}\n\n".encode()))
    return reply


def test_chunks_of_several_tokens_and_hidden_ones_count() -> None:
    def chunk(*ids: int) -> dict[str, Any]:
        return {"choices": [{"index": 0, "text": "x", "token_ids": list(ids)}]}

    reply = raw((11, chunk(1)), (12, chunk(2, 3)), (13, chunk()), (13, "[DONE]"))
    assert outcome_of(reply).token_times_s == (1.0, 2.0, 2.0)
    plain = {"choices": [{"index": 0, "text": "x"}]}
    usage = {"choices": [], "usage": {"completion_tokens": 3}}
    reply = raw((11, plain), (12, plain), (13, usage), (13, "[DONE]"))
    assert outcome_of(reply).token_times_s == (1.0, 2.0, 2.0)


def test_report_is_arithmetic() -> None:
    spec = dataclasses.replace(SPEC, slo_ttft_s=1.0, slo_tpot_s=0.25)
    outcomes = [
        Outcome((0.5, 1.0, 1.1)),  # TPOT 0.3: too slow
        Outcome((0.5, 0.7, 0.9)),
        Outcome((2.0, 2.1, 2.2)),  # TTFT too slow
        Outcome((0.9,)),
        Outcome((), "lost"),
    ]
    report = analyze(spec, outcomes, wall_s=2.0, client_cpu_share=0.1)
    assert (report.num_requests, report.num_completed, report.output_tokens) == (5, 4, 10)
    assert report.output_tokens_per_s == 5.0
    assert (report.num_within_slo, report.goodput_per_s) == (2, 1.0)
    assert report.handoff_gap_ms["p99"] == pytest.approx(500)
    assert report.ttft_ms["p50"] == pytest.approx(500)
    assert report.tpot_ms["mean"] == pytest.approx(200)
    assert report.errors == {"lost": 1}


def test_percentiles_are_nearest_rank() -> None:
    values = distribution([value / 1000 for value in range(1, 101)])
    assert (values["p50"], values["p95"], values["p99"]) == (50.0, 95.0, 99.0)
    assert distribution([0.004]) == {"p50": 4.0, "p95": 4.0, "p99": 4.0, "mean": 4.0}


def test_command_prints_and_writes_the_report(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    arguments = "bench --num-requests 4 --prompt-tokens 6 --output-tokens 3 --slo-tpot-s 9"
    with scripted_server(answer) as server:
        where = ["--base-url", server.base_url, "--json", str(path)]
        done = CliRunner().invoke(app, [*arguments.split(), *where])
    assert done.exit_code == 0, done.output
    assert "4 of 4 completed" in done.output
    assert "hand-off gap" in done.output
    document = json.loads(path.read_text())
    assert document["report"]["output_tokens"] == 12
    assert document["spec"]["concurrency"] == 16


def test_command_fails_when_a_request_failed() -> None:
    with scripted_server(broken("cut")) as server:
        done = CliRunner().invoke(
            app, ["bench", "--num-requests", "2", "--base-url", server.base_url]
        )
    assert done.exit_code == 1
    assert "2 x the reply was cut" in done.output
