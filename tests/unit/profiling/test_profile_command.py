"""`splitserve profile` as people run it, against a server that does as told."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from splitserve.calls import address_of
from splitserve.errors import SplitserveError, StreamBrokenError
from splitserve.profiling import fetch
from tests.unit.profiling.recorded import PREFILL_BOUND, stream
from tests.unit.scripted_server import Exchange, Handler, scripted_server
from tests.waiting import wait_until

RECORDED = stream(dataclasses.replace(PREFILL_BOUND, duration_s=4.0))


def run(base_url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own: that is where exit codes come from."""
    return subprocess.run(
        [sys.executable, "-m", "splitserve", "profile", "--base-url", base_url, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "NO_COLOR": "1"},
        check=False,
    )


def sends(data: bytes, ends: bool = True) -> Handler:
    def handler(exchange: Exchange) -> None:
        exchange.start_stream()
        for start in range(0, len(data), 4096):
            exchange.chunk(data[start : start + 4096])
        if ends:
            exchange.end()
        exchange.http.close_connection = True

    return handler


def answers(status: int, message: str = "no") -> Handler:
    return lambda exchange: exchange.json({"error": {"message": message}}, status)


def test_a_profile_becomes_a_table_a_report_and_a_trace(tmp_path: Path) -> None:
    html, trace = tmp_path / "report.html", tmp_path / "trace.json"
    with scripted_server(sends(RECORDED)) as server:
        done = run(
            server.base_url,
            *("--duration", "4", "--html", str(html), "--trace", str(trace), "--kernels", "3"),
            *("--api-key", "secret"),
        )
        exchange = server.exchanges[0]
    assert done.returncode == 0, done.stderr
    assert exchange.path == "/cluster/profile"
    assert exchange.body == {"duration_s": 4, "num_kernel_steps": 3}
    assert exchange.headers["authorization"] == "Bearer secret"
    assert "The prefill pool binds: compute." in done.stdout
    assert html.read_text("utf-8").startswith("<!doctype html>")
    assert json.loads(trace.read_text("utf-8"))["traceEvents"]
    assert str(html) in done.stdout


def test_kernels_without_a_trace_are_refused() -> None:
    """They would slow the cluster down, and nobody would see them."""
    done = run("http://127.0.0.1:1", "--kernels", "3")
    assert done.returncode != 0 and "add --trace FILE" in done.stderr


def test_kernels_are_asked_for_only_when_wanted() -> None:
    with scripted_server(sends(RECORDED)) as server:
        assert run(server.base_url).returncode == 0
        assert server.exchanges[0].body == {"duration_s": 30}


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (answers(401, "no such key"), "no such key (--api-key or SPLITSERVE_API_KEY)"),
        (answers(404), "an older one"),
        (answers(405), "an older one"),
        (answers(503, "shutting down"), "shutting down"),
        (sends(b"<html>hello</html>\n"), "sends no profile: <html>hello"),
        (sends(b""), "ended too early"),
    ],
)
def test_without_a_profile_there_is_one_clear_line(handler: Handler, message: str) -> None:
    with scripted_server(handler) as server:
        done = run(server.base_url)
    assert done.returncode == 1
    assert message in done.stderr
    assert (done.stdout, len(done.stderr.splitlines())) == ("", 1)


def test_nobody_there() -> None:
    with scripted_server() as server:
        base_url = server.base_url
    done = run(base_url)
    assert done.returncode == 1
    assert "can't reach" in done.stderr


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (sends(RECORDED[: len(RECORDED) // 2], ends=False), "the profile was cut off"),
        (sends(RECORDED[: len(RECORDED) // 2]), "ended too early"),
        (sends(RECORDED[:-30] + b'\n{"type": "error", "message": "all gone"}\n'), "all gone"),
    ],
)
def test_what_came_before_a_failure_is_reported(handler: Handler, message: str) -> None:
    with scripted_server(handler) as server:
        done = run(server.base_url)
    assert done.returncode == 1
    assert message in done.stderr
    assert "decode-1-" in done.stdout
    assert "note: cut short: " in done.stdout


def test_ctrl_c_reports_what_came() -> None:
    sent = threading.Event()
    hung_up = threading.Event()

    def handler(exchange: Exchange) -> None:
        exchange.start_stream()
        exchange.chunk(RECORDED[: len(RECORDED) // 2])
        for _ in range(16):  # more than sockets buffer: the client has read what came before
            exchange.chunk(b" " * (1 << 20) + b"\n")
        sent.set()
        while not hung_up.is_set():
            try:
                exchange.chunk(b"\n")
            except OSError:
                hung_up.set()
            hung_up.wait(0.05)

    with scripted_server(handler) as server:
        command = [sys.executable, "-m", "splitserve", "profile", "--base-url", server.base_url]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert sent.wait(30)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
        assert hung_up.wait(10), "the server was not told"
    assert process.returncode == 0, errors
    assert "note: cut short: " in output
    assert "decode-1-" in output


def test_a_folder_that_is_not_there_is_refused_before_the_wait(tmp_path: Path) -> None:
    done = run("http://127.0.0.1:9", "--trace", str(tmp_path / "no" / "trace.json"))
    assert done.returncode == 2
    assert "there is no folder" in done.stderr


@pytest.mark.parametrize("option", ["--html", "--trace"])
def test_what_cant_be_written_is_refused_before_the_wait(tmp_path: Path, option: str) -> None:
    done = run("http://127.0.0.1:9", option, str(tmp_path))
    assert done.returncode == 2
    assert "can't be written" in done.stderr


def test_the_report_is_not_written_over_by_the_trace(tmp_path: Path) -> None:
    path = str(tmp_path / "both")
    done = run("http://127.0.0.1:9", "--html", path, "--trace", path)
    assert done.returncode == 2
    assert "can't be the report and the trace" in done.stderr


def test_a_full_disk_costs_no_more_than_the_file(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with scripted_server(sends(RECORDED)) as server:
        done = run(server.base_url, "--html", "/dev/full", "--trace", str(trace))
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "splitserve: ConfigError: can't write /dev/full: No space left on device"
    ]
    assert "The prefill pool binds: compute." in done.stdout
    assert json.loads(trace.read_text("utf-8"))["traceEvents"]


def test_a_url_that_is_none_is_one_clear_line() -> None:
    done = run("http://127.0.0.1:x")
    assert done.returncode == 2
    assert "is no URL" in done.stderr and len(done.stderr.splitlines()) == 1


def encoded_falsely(exchange: Exchange) -> None:
    exchange.http.send_response(200)
    exchange.http.send_header("content-encoding", "gzip")
    exchange.http.send_header("content-length", "5")
    exchange.http.end_headers()
    exchange.http.wfile.write(b"hello")


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (encoded_falsely, "cut off by DecodingError"),
        (sends(b"[" * 100_000 + b"\n"), "sends no profile: [[["),
        (sends(b"x" * (5 << 20)), "longer than 4194304 bytes"),
    ],
)
def test_a_server_that_is_no_splitserve_is_one_clear_line(handler: Handler, message: str) -> None:
    with scripted_server(handler) as server:
        done = run(server.base_url)
    assert done.returncode == 1
    assert message in done.stderr
    assert (done.stdout, len(done.stderr.splitlines())) == ("", 1)


@pytest.mark.parametrize(("status", "expected"), [(200, StreamBrokenError), (500, SplitserveError)])
def test_a_server_that_never_ends_is_left(
    status: int, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends now and then, so that no single read is late."""
    monkeypatch.setattr(fetch, "_LATEST_S", 0.2)
    was_left: list[bool] = []

    def handler(exchange: Exchange) -> None:
        exchange.http.send_response(status)
        exchange.http.send_header("transfer-encoding", "chunked")
        exchange.http.end_headers()
        was_left.append(exchange.wait_for_hang_up())

    with scripted_server(handler) as server:
        address = address_of(server.base_url, None)
        with pytest.raises(expected), fetch.profile_stream(address, 0.1) as chunks:
            list(chunks)
        wait_until(lambda: was_left == [True], 10, "the server hears of it")
