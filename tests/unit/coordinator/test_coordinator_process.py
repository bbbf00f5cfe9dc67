"""The real process: what it loads, how it reports, how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from splitserve.config import READY_FD_ENV, ROLE_CONFIG_ENV, CoordinatorConfig, to_json

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
        cwd=Path(__file__).parents[3],
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
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 1 and ROLE_CONFIG_ENV in done.stderr
