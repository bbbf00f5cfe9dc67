from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from splitserve import cli
from splitserve.commands.options import is_of_one_pool
from splitserve.commands.serve import changed_settings
from splitserve.flags import all_flags
from splitserve.settings import resolve
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
    command = [sys.executable, "-m", "splitserve", *arguments]
    environment = {"COLUMNS": "400", "PATH": "/usr/bin:/bin", "HOME": "/tmp", **environ}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def invoke(*arguments: str, **kwargs: Any) -> Any:
    return CliRunner().invoke(cli.app, list(arguments), **kwargs)


@pytest.mark.parametrize("command", ["serve", "up"])
def test_help_names_every_flag_whole_at_any_width(command: str) -> None:
    text = invoke(command, "--help", env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).output
    words = set(text.replace("/", " ").split())
    for flag in all_flags().values():
        shown = not flag.file_only and not is_of_one_pool(flag)
        assert (flag.option in words) == shown, flag.option
    assert "as --prefill-... and" in text


def test_help_leaves_out_what_is_not_built() -> None:
    text = " ".join(invoke("serve", "--help").output.split())
    assert "--transport auto|tcp How KV travels. Not built yet: shm, collective, nixl." in text


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
        (["serve", "m", "--prefill", "abc"], "--prefill: expected a whole number, got 'abc'"),
        (["serve", "m", "--prefill", "-1"], "--prefill: -1 is below the least value 0"),
        (["serve", "cluster.yaml"], "did you mean --config cluster.yaml?"),
        (["scale"], "--prefill N, --decode N, or both"),
        (["serve", "m", "--config", "/no/such.yaml"], "can't read the config file"),
        (["restart", "--pool", "all"], "'all' is not one of 'prefill', 'decode'"),
        (["profile", "--html", "/no/such/folder/x.html"], "there is no folder /no/such/folder"),
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


def test_settings_are_not_shown_before_a_one_line_error() -> None:
    done = run("serve", "/no/such/model", "--port", "0")
    assert "settings:" not in done.stderr


def test_changed_settings_names_what_differs_and_hides_keys() -> None:
    given = {"model": "m", "port": 0, "api_key": ["secret"], "decode_num_blocks": 12}
    line = changed_settings(resolve(given, environ={}).document)
    assert line == (
        "settings: model=m, port=0, api_key=***, decode_num_blocks=12; --print-config shows all"
    )


def test_a_key_given_twice_in_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("engine:\n  num_blocks: 1\n  num_blocks: 2\n")
    done = run("serve", "m", "--print-config", "--config", str(file))
    assert done.returncode == 2
    assert "line 3 gives the key 'num_blocks' again" in done.stderr


def test_a_merge_in_a_file_is_no_second_key(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "prefill: &pool {num_workers: 2, num_blocks: 7}\ndecode:\n  <<: *pool\n  num_workers: 1\n"
    )
    done = run("serve", "m", "--print-config", "--config", str(file))
    assert done.returncode == 0, done.stderr
    document = yaml.safe_load(done.stdout)
    assert document["decode"] == document["prefill"] | {"num_workers": 1}


def cluster_of(*workers: dict[str, Any], failures: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {
        "model": "tiny",
        "target": {"prefill": 1, "decode": 2},
        "coordinator": {"num_requests_in_flight": 3, "num_requests_waiting": 4},
        "workers": list(workers),
        "failures": list(failures),
    }


def show_status(*arguments: str, columns: str = "60") -> str:
    long_id = {**WORKER, "worker_id": "decode-17-0123456789abcdef"}
    starting = {**WORKER, "worker_id": "decode-9", "state": "starting", "pid": None, "host": None}
    cluster = cluster_of(long_id, starting, {**WORKER, "worker_id": "prefill-9", "state": "dead"})
    with scripted_server(lambda exchange: exchange.json(cluster)) as server:
        done = invoke("status", "--base-url", server.base_url, *arguments, env={"COLUMNS": columns})
    assert done.exit_code == 0, done.output
    return str(done.output)


def test_status_shows_who_lives_and_counts_the_dead() -> None:
    text = show_status()
    for part in ("decode-17-0123456789abcdef", "4711", "3 requests in flight", "1 dead worker ("):
        assert part in text
    for part in ("prefill-9", "None", "\N{HORIZONTAL ELLIPSIS}"):
        assert part not in text


def test_status_shows_the_dead_when_asked() -> None:
    text = show_status("--all")
    assert "prefill-9" in text
    assert "dead worker" not in text


def test_status_never_cuts_an_id_in_a_narrow_terminal() -> None:
    leader, follower = pty.openpty()
    cluster = cluster_of({**WORKER, "worker_id": "decode-17-0123456789abcdef"})
    with scripted_server(lambda exchange: exchange.json(cluster)) as server:
        command = [sys.executable, "-m", "splitserve", "status", "--base-url", server.base_url]
        environment = {**os.environ, "COLUMNS": "50", "TERM": "xterm"}
        done = subprocess.run(command, stdout=follower, env=environment, timeout=60, check=False)
        shown = os.read(leader, 65536).decode()
    os.close(follower)
    os.close(leader)
    assert done.returncode == 0
    assert "decode-17-0123456789abcdef" in shown


def test_scale_sends_the_target_with_the_key() -> None:
    with scripted_server(lambda exchange: exchange.json(exchange.body)) as server:
        done = invoke(
            *("scale", "--prefill", "2", "--decode", "3", "--api-key", "k"),
            *("--base-url", server.base_url),
        )
        assert server.exchanges[0].body == {"prefill": 2, "decode": 3}
        assert server.exchanges[0].headers["authorization"] == "Bearer k"
    assert done.exit_code == 0
    assert done.output == "wanted: 2 prefill, 3 decode; see `splitserve status`\n"


@pytest.mark.parametrize(
    ("option", "target"),
    [("--prefill", {"prefill": 5, "decode": 2}), ("--decode", {"prefill": 1, "decode": 5})],
)
def test_scale_of_one_pool_keeps_the_other(option: str, target: dict[str, int]) -> None:
    with scripted_server(lambda exchange: exchange.json(cluster_of())) as server:
        done = invoke("scale", option, "5", "--base-url", server.base_url)
        assert done.exit_code == 0, done.output
        assert server.exchanges[-1].body == target


def test_restart_waits_until_every_worker_is_replaced() -> None:
    looks = 0

    def reply(exchange: Exchange) -> None:
        nonlocal looks
        if exchange.path == "/cluster/restart":
            exchange.json({"worker_ids": ["decode-0-a", "decode-1-b"]}, status=202)
            return
        looks += 1
        left = ["decode-1-b", "decode-2-c"] if looks == 1 else ["decode-2-c", "decode-3-d"]
        exchange.json({"workers": [{"worker_id": one, "state": "ready"} for one in left]})

    with scripted_server(reply) as server:
        done = invoke("restart", "--pool", "decode", "--base-url", server.base_url)
        assert server.exchanges[0].body == {"pool": "decode"}
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[1:] == ["decode-0-a is replaced", "decode-1-b is replaced"]


def test_restart_says_who_is_still_there() -> None:
    def reply(exchange: Exchange) -> None:
        exchange.json({"worker_ids": ["p"], "workers": [{"worker_id": "p", "state": "ready"}]})

    with scripted_server(reply) as server:
        address = ("--base-url", server.base_url, "--timeout-s", "1")
        done = run("restart", "--pool", "prefill", *address)
    assert done.returncode == 1 and "still there: p" in done.stderr


def test_status_shows_why_a_worker_first_died() -> None:
    """gpustack/gpustack#6019: a restart loop hid the log of the first failure."""
    failure: dict[str, Any] = {
        "launch_id": "decode-1",
        "role": "decode",
        "reason": "exited with code 1",
    }
    failure |= {"last_lines": "Traceback\nNoMoney", "num_failures": 6, "given_up": True}
    cluster = cluster_of(failures=[failure, {**failure, "reason": "its process was killed"}])
    cluster["coordinator"]["previous_end"] = "coordinator (pid 7) was killed by SIGKILL"
    with scripted_server(lambda exchange: exchange.json(cluster)) as server:
        output = invoke("status", "--base-url", server.base_url).output
    assert "decode: died 6 times, given up; first decode-1: exited with code 1" in output
    assert output.count("    Traceback\n    NoMoney") == 1, "who is killed says nothing about it"
    assert "the one before: coordinator (pid 7) was killed by SIGKILL" in output


def test_a_wrong_key_is_said_to_be_one() -> None:
    body = {"error": {"message": "no valid API key", "code": "invalid_api_key"}}
    with scripted_server(lambda exchange: exchange.json(body, status=401)) as server:
        done = run("status", "--base-url", server.base_url)
    assert done.returncode == 1
    assert "no valid API key (--api-key or SPLITSERVE_API_KEY)" in done.stderr


def reply_hello(exchange: Exchange) -> None:
    exchange.start_stream()
    for word in ("Hel", "lo"):
        exchange.event({"choices": [{"index": 0, "delta": {"content": word}}]})
    exchange.event("[DONE]")
    exchange.end()


def refuse(exchange: Exchange, param: str) -> None:
    detail = {"message": f"{param} is too long", "param": param, "code": "context_length_exceeded"}
    exchange.json({"error": detail}, status=400)


def contents(exchange: Exchange) -> list[str]:
    return [message["content"] for message in exchange.body["messages"]]


def test_chat_streams_and_remembers() -> None:
    with scripted_server(reply_hello) as server:
        arguments = ("chat", "--base-url", server.base_url, "--system", "Be kind")
        done = invoke(*arguments, "--max-tokens", "9", input="Hi\n\nAgain\n")
        second = server.exchanges[1]
    assert done.exit_code == 0, done.output
    assert done.stdout == "Hello\nHello\n"  # a pipe gets the answers and nothing else
    assert (second.body["max_tokens"], second.body["temperature"]) == (9, 0.2)
    assert contents(second) == ["Be kind", "Hi", "Hello", "Again"]


def test_chat_answers_end_by_default() -> None:
    with scripted_server(reply_hello) as server:
        invoke("chat", "--base-url", server.base_url, input="Hi\n")
        assert server.exchanges[0].body["max_tokens"] == 512


def test_chat_uses_what_is_left_of_a_small_context() -> None:
    def reply(exchange: Exchange) -> None:
        if "max_tokens" in exchange.body:
            refuse(exchange, "max_tokens")
        else:
            reply_hello(exchange)

    with scripted_server(reply) as server:
        done = invoke("chat", "--base-url", server.base_url, input="Hi\n")
    assert done.stdout == "Hello\n"


def test_chat_from_a_pipe_fails_when_a_prompt_does() -> None:
    with scripted_server(lambda exchange: refuse(exchange, "prompt")) as server:
        done = subprocess.run(
            [sys.executable, "-m", "splitserve", "chat", "--base-url", server.base_url],
            input="Hi\n",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stdout.strip()) == (1, "")
    assert "prompt is too long" in done.stderr


def test_chat_in_a_terminal_goes_on_after_an_error() -> None:
    def reply(exchange: Exchange) -> None:
        if contents(exchange)[-1] == "too much":
            refuse(exchange, "prompt")
        else:
            reply_hello(exchange)

    leader, follower = pty.openpty()
    os.write(leader, b"one\ntoo much\ntwo\n/new\nthree\n\x04")
    with scripted_server(reply) as server:
        command = [sys.executable, "-m", "splitserve", "chat", "--base-url", server.base_url]
        done = subprocess.run(
            command, stdin=follower, capture_output=True, text=True, timeout=60, check=False
        )
        asked = [contents(exchange) for exchange in server.exchanges]
    os.close(follower)
    os.close(leader)
    assert done.returncode == 0, done.stderr
    assert asked == [["one"], ["one", "Hello", "too much"], ["one", "Hello", "two"], ["three"]]
    assert "prompt is too long" in done.stderr
    assert "tiny at http://127.0.0.1" in done.stdout


def test_version() -> None:
    assert run("--version").stdout.startswith("splitserve 0.")
