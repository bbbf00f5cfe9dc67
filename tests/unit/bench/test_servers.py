from __future__ import annotations

import os
import shlex
import socket
import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks.servers import Server, running, server_of, servers_of
from splitserve.errors import ConfigError, LaunchError
from tests.unit.launch.fakes import is_running
from tests.unit.scripted_server import Exchange, scripted_server

# A server that is busy coming up at first, and starts a process of its own that ignores SIGTERM.
SCRIPT = """
import http.server, signal, subprocess, sys

ignore = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", ignore], stdout=subprocess.PIPE)
child.stdout.readline()
open(sys.argv[2], "w").write(str(child.pid))
looks = 0

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global looks
        looks += 1
        known = self.path != "/ready"
        self.send_response(404 if not known else 200 if looks > 4 else 503)
        self.end_headers()
        if self.path == "/v1/models":
            self.wfile.write(b'{"data": [{"id": "scripted"}]}')

    def log_message(self, *args):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("text", "server"),
    [
        ("peer=http://h:81/v1", Server("peer", "http://h:81/v1")),
        ("a=serve 'x y'", Server("a", "http://127.0.0.1:8000", ("serve", "x y"))),
        ("a=s --port 9 -x", Server("a", "http://127.0.0.1:9", ("s", "--port", "9", "-x"))),
        ("a=s --port=9", Server("a", "http://127.0.0.1:9", ("s", "--port=9"))),
    ],
)
def test_servers_on_the_command_line(text: str, server: Server) -> None:
    assert server_of(text) == server


@pytest.mark.parametrize("text", ["http://h:81", "=x", "a=", "a"])
def test_what_describes_no_server_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="neither NAME=URL nor NAME=COMMAND"):
        server_of(text)


def test_servers_in_a_file() -> None:
    text = """
    ours: {command: splitserve serve m --port 8001}
    peer: {command: serve m, url: http://127.0.0.1:81, health: /up, model: n, env: {SPACE: 2}}
    up: {url: http://127.0.0.1:82}
    """
    ours, peer, up = servers_of(textwrap.dedent(text))
    assert up == server_of("up=http://127.0.0.1:82")
    assert ours == server_of("ours=splitserve serve m --port 8001")
    assert (peer.url, peer.health, peer.model, peer.env) == (
        "http://127.0.0.1:81",
        "/up",
        "n",
        {"SPACE": "2"},
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a, b]", "not a mapping"),
        ("a: {command: x, prot: 1}", "server a is not a mapping with keys of api_key, command"),
        ("a: {model: x}", "neither a command nor a url"),
        ("a: {url: x}\na: {url: y}", "again"),
        ("a: {command: null}", "neither a command nor a url"),
        ("a: {url: x, env: [A]}", "env is not a mapping"),
        ("""a: {command: "serve 'x"}""", "the command can't be read"),
    ],
)
def test_files_that_say_nothing_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        servers_of(text)


def test_what_is_null_in_a_file_was_not_given() -> None:
    (server,) = servers_of("a: {command: serve, url: null, env: null}")
    assert server == server_of("a=serve")


def test_a_description_has_what_tunes_a_server_and_no_secrets() -> None:
    env = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_TOKEN": "t0p", "my_api_key": "t0p"}
    command = ("serve", "--api-key", "t0p", "--ssl-key=t0p", "--max-num-batched-tokens", "64")
    server = Server("a", "http://a", (*command, "t0p"), "/up", "m", "t0p", env)
    described = server.described()
    assert described["env"]["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert set(described["env"]) == set(env)
    assert described["command"][-3:-1] == ["--max-num-batched-tokens", "64"]
    assert (described["health"], described["model"]) == ("/up", "m")
    assert "t0p" not in str(described)


def scripted(tmp_path: Path, port: int, script: str = SCRIPT) -> Server:
    path = tmp_path / "server.py"
    path.write_text(script)
    command = shlex.join([sys.executable, str(path), str(port), str(tmp_path / "pid")])
    return server_of(f"scripted={command} --port {port}")


def test_a_server_is_waited_for_and_stopped_with_all_it_started(tmp_path: Path) -> None:
    with running(scripted(tmp_path, free_port()), 30) as up:
        assert (up.endpoint.model, up.version) == ("scripted", None)
        child = int((tmp_path / "pid").read_text())
        assert os.getsid(child) == up.session_id
        assert is_running(child)
    assert not is_running(child)


def test_a_start_that_fails_is_told_with_the_last_words(tmp_path: Path) -> None:
    server = scripted(tmp_path, free_port(), "import sys; sys.exit('shard 3 is corrupt')")
    with pytest.raises(LaunchError, match=r"(?s)scripted: it exited with code 1.*shard 3"):
        with running(server, 30):
            raise AssertionError("it was ready")


def test_a_command_that_is_not_there_is_told() -> None:
    with pytest.raises(LaunchError, match="can't start a"):
        with running(server_of(f"a=/no/such/program --port {free_port()}"), 5):
            raise AssertionError("it was ready")


def test_a_start_has_a_deadline() -> None:
    sleeper = shlex.join([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(LaunchError, match="not ready in time"):
        with running(server_of(f"a={sleeper} --port {free_port()}"), 0.3):
            raise AssertionError("it was ready")


def test_a_server_that_is_in_the_way_is_not_measured() -> None:
    with scripted_server() as other:
        port = other.base_url.rpartition(":")[2]
        with pytest.raises(LaunchError, match="something answers at"):
            with running(server_of(f"a=true --port {port}"), 5):
                raise AssertionError("it was taken for ours")


def test_a_server_that_runs_already_is_left_running() -> None:
    def ready(exchange: Exchange) -> None:
        exchange.json({"version": "0.32"} if exchange.path == "/version" else {})

    with scripted_server(ready) as server:
        with running(server_of(f"peer={server.base_url}"), 5) as up:
            assert (up.endpoint.base_url, up.endpoint.model) == (server.base_url, "tiny")
            assert (up.session_id, up.version) == (None, "0.32")
        with running(server_of(f"peer={server.base_url}"), 5):
            pass
