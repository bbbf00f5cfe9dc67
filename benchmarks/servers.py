"""Servers to compare: how they are described, started, and stopped for good."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import IO, Any
from urllib.parse import urlsplit

import httpx
import yaml

from benchmarks.machine import processes
from splitserve.bench.measure import Endpoint
from splitserve.client import Client
from splitserve.errors import ConfigError, LaunchError
from splitserve.process import describe_exit, python_executable
from splitserve.yaml_loading import load_yaml

_HEALTH_PATHS = ("/ready", "/health")  # the first that a server knows
_LOOK_S = 0.1  # between two looks at another process
_REQUEST_S = 5.0
_GRACE_S = 60.0  # for a server to end when told to
_LEFT_S = 2.0  # for what a server left behind to end too, before it is killed
_GONE_S = 10.0  # for what was killed to be gone
_LAST_BYTES = 2000
_SECRET_NAMES = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_HIDDEN = "(hidden)"


@dataclass(frozen=True, slots=True)
class Server:
    """A server to measure. Without a command it is already running, and stays."""

    name: str
    url: str
    command: tuple[str, ...] = ()
    health: str | None = None  # a path that answers 200; None: /ready where it exists, or /health
    model: str | None = None  # None: the first that it lists
    api_key: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """How to start it again, for a file that others read: values of secrets are hidden."""
        is_secret = {name: any(part in name.upper() for part in _SECRET_NAMES) for name in self.env}
        return {
            "name": self.name,
            "url": self.url,
            "command": _without_keys(self.command, self.api_key),
            "health": self.health,
            "model": self.model,
            "env": {name: _HIDDEN if is_secret[name] else self.env[name] for name in self.env},
        }


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers. Without a session it was not started here, so that its processes
    are not known."""

    endpoint: Endpoint
    session_id: int | None
    version: str | None  # as it says at /version, if it does


def _without_keys(command: Sequence[str], api_key: str | None) -> list[str]:
    """Options whose name ends in -key are the secrets of a command line, and the key itself."""
    shown = []
    for before, word in zip(("", *command), command, strict=False):
        option, is_pair, _ = word.partition("=")
        if is_pair and option.startswith("-") and option.endswith("-key"):
            word = f"{option}={_HIDDEN}"
        elif before.startswith("-") and before.endswith("-key"):
            word = _HIDDEN
        elif api_key:
            word = word.replace(api_key, _HIDDEN)
        shown.append(word)
    return shown


def server_of(text: str) -> Server:
    """From NAME=URL or NAME=COMMAND; a command's URL follows from its --port. ConfigError."""
    name, found, rest = text.partition("=")
    if not (name and found and rest.strip()):
        raise ConfigError(f"--server {text!r} is neither NAME=URL nor NAME=COMMAND")
    if rest.startswith(("http://", "https://")):
        return Server(name, rest)
    command = _words(name, rest)
    return Server(name, _url_of(command), command)


def servers_of(text: str) -> list[Server]:
    """From YAML: a mapping of names to `command` and/or `url`, and `health`, `model`, `api_key`,
    `env`. Raises ConfigError."""
    try:
        document = load_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the list of servers is no YAML: {error}") from error
    if not isinstance(document, Mapping):
        raise ConfigError("the list of servers is not a mapping of names")
    return [_server_of_entry(str(name), entry) for name, entry in document.items()]


def _server_of_entry(name: str, entry: object) -> Server:
    known = {one.name for one in fields(Server)} - {"name"}
    if not isinstance(entry, Mapping) or not set(entry) <= known:
        raise ConfigError(f"server {name} is not a mapping with keys of {', '.join(sorted(known))}")
    values = {key: value for key, value in entry.items() if value is not None}
    values["command"] = _words(name, str(values.get("command", "")))
    if not values["command"] and "url" not in values:
        raise ConfigError(f"server {name} has neither a command nor a url")
    env = values.get("env", {})
    if not isinstance(env, Mapping):
        raise ConfigError(f"server {name}: env is not a mapping of names to values")
    values["env"] = {str(key): str(value) for key, value in env.items()}
    if "url" not in values:
        values["url"] = _url_of(values["command"])
    return Server(name, **values)


def _words(name: str, command: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(command))
    except ValueError as error:
        raise ConfigError(f"server {name}: the command can't be read: {error}") from error


def _url_of(command: Sequence[str]) -> str:
    """Where a command will listen on this machine: --port PORT, else 8000."""
    port = "8000"
    for word, following in zip(command, (*command[1:], ""), strict=True):
        if word == "--port":
            port = following
        elif word.startswith("--port="):
            port = word.removeprefix("--port=")
    return f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def running(server: Server, start_timeout_s: float) -> Iterator[Running]:
    """Started where it has a command, and gone afterwards with all that it started.

    Raises LaunchError when it doesn't come up, or ended before its time: then with the end of what
    it printed.
    """
    if not server.command:
        _wait_ready(server, None, time.monotonic() + start_timeout_s)
        yield Running(_endpoint(server), None, _version(server))
        return
    if _answers(server.url):
        raise LaunchError(f"before {server.name} was started, something answers at {server.url}")
    with tempfile.TemporaryFile() as output:
        process = _start(server, output.fileno())
        try:
            _wait_ready(server, process, time.monotonic() + start_timeout_s)
            yield Running(_endpoint(server), process.pid, _version(server))
            _check_running(process)
        except LaunchError as error:
            raise LaunchError(
                f"{server.name}: {error}; the last it said:\n{_end_of(output)}"
            ) from error
        finally:
            _stop(server, process)


def _end_of(output: IO[bytes]) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - _LAST_BYTES))
    return output.read().decode(errors="replace").strip()


def _start(server: Server, output: int) -> subprocess.Popen[bytes]:
    """In a session of its own: what it starts is known by it, and Ctrl-C does not reach it."""
    command = list(server.command)
    if command[0] == "splitserve":  # ours, whatever PATH says
        command[:1] = [python_executable(), "-m", "splitserve"]
    try:
        return subprocess.Popen(
            command,
            env={**os.environ, **server.env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"can't start {server.name}: {error}") from error


def _wait_ready(server: Server, process: subprocess.Popen[bytes] | None, deadline: float) -> None:
    while time.monotonic() < deadline:
        if process is not None:
            _check_running(process)
        if _is_ready(server):
            return
        time.sleep(_LOOK_S)
    raise LaunchError(f"not ready in time at {server.url}")


def _check_running(process: subprocess.Popen[bytes]) -> None:
    exit_code = process.poll()
    if exit_code is not None:
        raise LaunchError(f"it {describe_exit(exit_code)}")


def _is_ready(server: Server) -> bool:
    paths = (server.health,) if server.health else _HEALTH_PATHS
    for path in paths:
        try:
            status = httpx.get(server.url + path, timeout=_REQUEST_S).status_code
        except httpx.TransportError:
            return False
        if status != httpx.codes.NOT_FOUND:
            return status == httpx.codes.OK
    return False


def _endpoint(server: Server) -> Endpoint:
    with Client(server.url, server.api_key, model=server.model) as client:
        return Endpoint(client.base_url, client.model, server.api_key)


def _version(server: Server) -> str | None:
    with contextlib.suppress(httpx.TransportError, ValueError):
        found = httpx.get(server.url.removesuffix("/v1") + "/version", timeout=_REQUEST_S).json()
        if isinstance(found, Mapping) and "version" in found:
            return str(found["version"])
    return None


def _stop(server: Server, process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to it; what is left of its session then is killed. Raises LaunchError when
    something of it stays."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    if not _is_gone(server, process, _LEFT_S):
        for pid in _session(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not _is_gone(server, process, _GONE_S):
            left = _session(process.pid)
            raise LaunchError(f"{server.name} is not gone: processes {left}, {server.url}")


def _is_gone(server: Server, process: subprocess.Popen[bytes], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if process.poll() is not None and not _session(process.pid) and not _answers(server.url):
            return True
        time.sleep(_LOOK_S)
    return False


def _session(session_id: int) -> list[int]:
    """The living processes of a session (Linux; elsewhere none are found)."""
    return [one.pid for one in processes() if one.session_id == session_id and one.is_alive]


def _answers(url: str) -> bool:
    address = urlsplit(url)
    with socket.socket() as probe:
        probe.settimeout(_REQUEST_S)
        return probe.connect_ex((address.hostname, address.port or 80)) == 0
