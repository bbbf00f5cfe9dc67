from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from splitserve import cli
from splitserve.flags import all_flags
from tests.unit.scripted_server import Exchange, scripted_server

WORKER = {
    "worker_id": "decode-1a2b",
    "role": "decode",
    "state": "ready",
    "pid": 4711,
    "host": "here",
    "num_blocks_total": 100,
}


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "splitserve.cli", *arguments]
    environment = {"COLUMNS": "400", "PATH": "/usr/bin:/bin", "HOME": "/tmp", **environ}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def invoke(*arguments: str, **kwargs: Any) -> Any:
    return CliRunner().invoke(cli.app, list(arguments), **kwargs)


@pytest.mark.parametrize("command", ["serve", "up"])
def test_help_lists_every_flag(command: str) -> None:
    text = invoke(command, "--help", env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"}).output
    for flag in all_flags().values():
        assert (flag.option in text) == (not flag.file_only), flag.option


def test_print_config_prints_what_was_resolved() -> None:
    done = run("serve", "m", "--print-config", "--prefill", "2", SPLITSERVE_DECODE_NUM_BLOCKS="12")
    assert done.returncode == 0, done.stderr
    document = yaml.safe_load(done.stdout)
    assert document["model"] == "m"
    assert document["prefill"]["num_workers"] == 2
    assert document["decode"]["num_blocks"] == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "m", "--max-num-seq", "3"], "--max-num-seqs"),
        (["serve", "m", "--host", "0.0.0.0"], "give an --api-key"),
        (["serve", "m", "--model", "n"], "two models"),
        (["serve"], "no model"),
        (["serve", "m", "--config", "/no/such.yaml"], "can't read the config file"),
        (["restart", "--pool", "decode"], "not built yet"),
        (["profile"], "not built yet"),
        (["bench", "--concurrency", "1", "--request-rate", "1"], "not both"),
        (["bench", "--shared-prefix-tokens", "9999"], "--shared-prefix-tokens 9999 is above"),
    ],
)
def test_nonsense_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_failure_is_one_line_and_exit_code_1() -> None:
    done = run("serve", "/no/such/model", "--port", "0")
    assert done.returncode == 1
    assert "ModelNotFoundError" in done.stderr
    assert "/no/such/model" in done.stderr
    assert "Traceback" not in done.stderr
    done = run("status", SPLITSERVE_BASE_URL="http://127.0.0.1:9")
    assert done.returncode == 1
    assert "can't reach http://127.0.0.1:9" in done.stderr


def test_status_shows_every_worker() -> None:
    cluster = {
        "model": "tiny",
        "target": {"prefill": 1, "decode": 2},
        "coordinator": {"num_requests_in_flight": 3, "num_requests_waiting": 4},
        "workers": [WORKER, {**WORKER, "worker_id": "prefill-9", "state": "dead"}],
    }
    with scripted_server(lambda exchange: exchange.json(cluster)) as server:
        done = invoke("status", "--base-url", server.base_url, env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    for text in ("decode-1a2b", "prefill-9", "dead", "4711", "3 requests in flight"):
        assert text in done.output


def test_scale_sends_the_target_with_the_key() -> None:
    with scripted_server(lambda exchange: exchange.json(exchange.body)) as server:
        done = invoke(
            *("scale", "--prefill", "2", "--decode", "3", "--api-key", "k"),
            *("--base-url", server.base_url),
        )
        assert server.exchanges[0].body == {"prefill": 2, "decode": 3}
        assert server.exchanges[0].headers["authorization"] == "Bearer k"
    assert done.exit_code == 0


def test_chat_streams_and_remembers() -> None:
    def reply(exchange: Exchange) -> None:
        exchange.start_stream()
        for word in ("Hel", "lo"):
            exchange.event({"choices": [{"index": 0, "delta": {"content": word}}]})
        exchange.event("[DONE]")
        exchange.end()

    with scripted_server(reply) as server:
        arguments = (
            "chat",
            "--base-url",
            server.base_url,
            "--system",
            "Be kind",
            "--max-tokens",
            "9",
        )
        done = invoke(*arguments, input="Hi\n\nAgain\n")
        second = server.exchanges[1].body
    assert done.exit_code == 0, done.output
    assert done.output.count("Hello") == 2
    assert second["max_tokens"] == 9
    assert [message["content"] for message in second["messages"]] == [
        "Be kind",
        "Hi",
        "Hello",
        "Again",
    ]


def test_version() -> None:
    assert run("--version").stdout.startswith("splitserve 0.")
