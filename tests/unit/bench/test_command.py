from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from splitserve.cli import app
from splitserve.errors import ConfigError
from tests.unit.scripted_server import Exchange, scripted_server
from tests.unit.test_bench import answer, broken


def bench(base_url: str, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "--base-url", base_url, *arguments])


FOUR = "--num-requests 4 --prompt-tokens 6 --output-tokens 3".split()


def test_command_prints_and_writes_the_report(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with scripted_server(answer) as server:
        files = ("--json", str(path), "--warm-up", "0")
        done = bench(server.base_url, *FOUR, "--slo-tpot-s", "9", *files)
    assert done.exit_code == 0, done.output
    assert "4 of 4 completed" in done.output
    assert "hand-off gap" in done.output
    assert "within the SLO" in done.output
    document = json.loads(path.read_text())
    assert (document["workload"], document["spec"]["concurrency"]) == ("w1", 16)
    assert document["numbers"]["output_tokens"]["median"] == 12
    (repeat,) = document["repeats"]
    assert [len(request["token_times_s"]) for request in repeat["requests"]] == [3] * 4


def test_command_repeats_with_seeds_of_their_own_and_draws(tmp_path: Path) -> None:
    json_file, plot = tmp_path / "report.json", tmp_path / "plot.svg"
    with scripted_server(answer) as server:
        files = ("--json", str(json_file), "--plot", str(plot))
        repeats = ("--repeats", "3", "--warm-up", "1", "--seed", "7")
        done = bench(server.base_url, *FOUR, *repeats, *files)
        prompts = {tuple(exchange.body["prompt"]) for exchange in server.exchanges}
    assert done.exit_code == 0, done.output
    assert len(prompts) == 3 * (4 + 1)
    assert "medians of 3 repeats" in done.output and "12 of 12 completed" in done.output
    document = json.loads(json_file.read_text())
    assert [repeat["seed"] for repeat in document["repeats"]] == [7, 8, 9]
    assert document["seed"] == 7
    assert document["numbers"]["ttft_p50_ms"]["num_values"] == 3
    assert plot.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--plot plot.png", "must end with .svg"),
        ("--json nowhere/report.json", "there is no folder"),
        ("--json /proc/report.json", "/proc/report.json can't be written"),
        ("--json .", "can't be written"),
        ("--json both.svg --plot both.svg", "both.svg can't be the numbers and the plot"),
        ("--workload w3 --prompt-tokens 7", "w3 has no --prompt-tokens"),
    ],
)
def test_command_refuses_before_it_sends_anything(arguments: str, message: str) -> None:
    with scripted_server(answer) as server:
        done = bench(server.base_url, *arguments.split())
        assert server.exchanges == []
    assert message in str(done.exception)


def test_command_shows_its_table_when_the_disk_is_full() -> None:
    with scripted_server(answer) as server:
        done = bench(server.base_url, *FOUR, "--json", "/dev/full")
    assert "4 of 4 completed" in done.output
    assert isinstance(done.exception, ConfigError)
    assert "can't write /dev/full" in str(done.exception)


def test_two_runs_share_no_prompt_unless_a_seed_is_given(tmp_path: Path) -> None:
    path = tmp_path / "report.json"

    def prompts(*arguments: str) -> set[tuple[int, ...]]:
        with scripted_server(answer) as server:
            done = bench(server.base_url, *FOUR, "--json", str(path), *arguments)
            assert done.exit_code == 0, done.output
            assert f"--seed {json.loads(path.read_text())['seed']} " in done.output
            return {tuple(exchange.body["prompt"]) for exchange in server.exchanges}

    first = prompts()
    seed = str(json.loads(path.read_text())["seed"])
    assert not first & prompts()
    assert first == prompts("--seed", seed)


def test_medians_over_failed_requests_say_so() -> None:
    def fail_the_first(exchange: Exchange) -> None:
        (broken("cut") if len(server.exchanges) == 1 else answer)(exchange)

    with scripted_server() as server:
        server.handler = fail_the_first
        done = bench(server.base_url, *FOUR, "--repeats", "2", "--warm-up", "0")
    assert "medians of 2 repeats (least..greatest), 1 of them with failed requests" in done.output


def test_command_fails_when_a_request_failed() -> None:
    with scripted_server(broken("cut")) as server:
        done = bench(server.base_url, "--num-requests", "2", "--warm-up", "0")
    assert done.exit_code == 1
    assert "ERROR: 2 x the reply was cut" in done.output
