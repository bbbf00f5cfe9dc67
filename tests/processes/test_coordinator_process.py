"""The real process: what it loads, how it reports, how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from splitserve.config import READY_FD_ENV, ROLE_CONFIG_ENV, CoordinatorConfig, to_json
from splitserve.models import fingerprint
from tests.unit.coordinator.scripted_worker import Script, ScriptedWorker, facts
from tests.waiting import wait_until

PRINT_MODULES = (
    "import sys, atexit; atexit.register(lambda: print('loaded', 'torch' in sys.modules,"
    " 'kv_transfer' in sys.modules, 'splitserve.engine' in sys.modules)); "
    "import runpy; runpy.run_module('coordinator', run_name='__main__')"
)


def start(model: Path, *python: str, **config: Any) -> tuple[subprocess.Popen[str], int]:
    """The process, and the reading end of its ready pipe."""
    reader, writer = os.pipe()
    options = {"port": 0, "parent_pid": os.getpid(), **config}
    role_config = to_json(CoordinatorConfig(str(model), "tiny", ("tiny",), **options))
    process = subprocess.Popen(
        [sys.executable, *(python or ("-m", "coordinator"))],
        env={**os.environ, ROLE_CONFIG_ENV: role_config, READY_FD_ENV: str(writer)},
        pass_fds=(writer,),
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    os.close(writer)
    return process, reader


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_never_loads_torch_and_stops_when_told(
    model: Path, number: signal.Signals
) -> None:
    port = free_port()
    process, reader = start(model, "-c", PRINT_MODULES, port=port)
    with os.fdopen(reader) as pipe:
        assert json.loads(pipe.readline())["control_endpoint"].startswith("tcp://127.0.0.1:")
        assert pipe.read() == "", "one line, and the pipe is closed"
    body = httpx.post(
        f"http://127.0.0.1:{port}/tokenize", json={"prompt": "hi"}, timeout=20, trust_env=False
    ).json()
    assert body["tokens"] == [104, 105]
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0, output
    assert "loaded False False False" in output


def test_the_end_is_quick_and_clear(model: Path) -> None:
    """Whoever waits is told, workers too; a client that is slow delays nothing."""
    port = free_port()
    process, reader = start(model, port=port, num_prefill=0, num_decode=1)
    with os.fdopen(reader) as pipe:
        endpoint = json.loads(pipe.readline())["control_endpoint"]
    worker = ScriptedWorker("decode", endpoint, facts(fingerprint(model)), Script(step_s=0.05))
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as http,
        socket.create_connection(("127.0.0.1", port), timeout=20) as slow,
    ):
        wait_until(lambda: http.get("/ready").status_code == 200, 10.0, "ready")
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        body = {"prompt": "hi", "max_tokens": 500, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            told_at = time.monotonic()
            rest = [line for line in lines if line]
        output, _ = process.communicate(timeout=20)
    assert time.monotonic() - told_at < 4.0
    assert process.returncode == 0, output
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert error["message"] == "the cluster was shut down"
    wait_until(lambda: bool(worker.releases), 5.0, "the worker was told")
    worker.close()


def test_a_taken_port_is_an_exit_with_one_clear_line(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process, reader = start(model, port=port)
        output, _ = process.communicate(timeout=20)
    with os.fdopen(reader) as pipe:
        assert pipe.read() == ""
    assert process.returncode == 1
    assert f"127.0.0.1 port {port}" in output and "Traceback" not in output


def test_without_a_config_it_says_so() -> None:
    environment = {k: v for k, v in os.environ.items() if k != ROLE_CONFIG_ENV}
    done = subprocess.run(
        [sys.executable, "-m", "coordinator"],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 1 and ROLE_CONFIG_ENV in done.stderr
