"""One child process: started from a thread that lives as long as it does, its output kept."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from splitserve.errors import LaunchError
from splitserve.process import describe_exit, python_executable

_NUM_KEPT_LINES = 60
_KEPT_BYTES = 4096
_SPAWN_TIMEOUT_S = 30.0
_LAST_OUTPUT_TIMEOUT_S = 2.0  # for a pipe that a grandchild holds open


@dataclass(frozen=True, slots=True)
class Exited:
    """A process is gone and reaped. `last_lines` is the end of its output, at most 4 kB."""

    launch_id: str
    pid: int
    exit_code: int  # negative: the signal
    last_lines: str

    def __str__(self) -> str:
        text = f"{self.launch_id} (pid {self.pid}) {describe_exit(self.exit_code)}"
        return f"{text}; the last it said:\n{self.last_lines}" if self.last_lines else text


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run: `python -m module` with extra environment, under the name `launch_id`."""

    launch_id: str
    module: str
    environment: Mapping[str, str]
    pass_fds: tuple[int, ...] = ()  # closed in this process once the child has them


def echo_to_stderr(launch_id: str, line: str) -> None:
    """Pass a child's line on, with its name before it. A closed stderr is nobody listening."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"[{launch_id}] {line}\n")
        sys.stderr.flush()


class ChildProcess:
    """Owns one child process, from its start until it is reaped.

    The child is started, and waited for, by a thread of this object: a child that asked to die
    with its parent thread (process.die_with_parent) then dies with this process and not before.
    It has a process group of its own, so that Ctrl-C at a terminal reaches the launcher alone.
    """

    def __init__(
        self,
        spec: ChildSpec,
        on_exit: Callable[[Exited], None],
        echo: Callable[[str, str], None] = echo_to_stderr,
    ) -> None:
        """Start it. Raises LaunchError when the operating system refuses."""
        self._spec = spec
        self._on_exit = on_exit
        self._echo = echo
        self._lines: collections.deque[str] = collections.deque(maxlen=_NUM_KEPT_LINES)
        self._process: subprocess.Popen[bytes] | None = None
        self._refusal: OSError | None = None
        self._spawned = threading.Event()
        self._reaped = threading.Event()
        self._kill_timer: threading.Timer | None = None
        threading.Thread(
            target=self._supervise, name=f"child-{spec.launch_id}", daemon=True
        ).start()
        if not self._spawned.wait(_SPAWN_TIMEOUT_S) or self._process is None:
            raise LaunchError(f"can't start {spec.launch_id}: {self._refusal or 'timed out'}")

    @property
    def launch_id(self) -> str:
        return self._spec.launch_id

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when the process is gone."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def stop(self, grace_s: float) -> None:
        """SIGTERM now, SIGKILL after the grace. Returns at once."""
        self.signal(signal.SIGTERM)
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        self._kill_timer = threading.Timer(grace_s, self.kill)
        self._kill_timer.daemon = True
        self._kill_timer.start()

    def wait(self, timeout_s: float) -> bool:
        """Whether it is gone and reaped within the timeout."""
        return self._reaped.wait(max(timeout_s, 0.0))

    def last_lines(self) -> str:
        """The end of what it printed, at most 4 kB."""
        text = "\n".join(self._lines)
        return text.encode()[-_KEPT_BYTES:].decode(errors="ignore")

    def _supervise(self) -> None:
        spec = self._spec
        try:
            self._process = process = subprocess.Popen(
                [python_executable(), "-m", spec.module],
                env=child_environment(spec.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=spec.pass_fds,
                process_group=0,
            )
        except OSError as error:
            self._refusal = error
            return
        finally:
            for descriptor in spec.pass_fds:
                os.close(descriptor)
            self._spawned.set()
        assert process.stdout is not None
        reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        reader.start()
        exit_code = process.wait()
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        reader.join(_LAST_OUTPUT_TIMEOUT_S)
        self._reaped.set()
        self._on_exit(Exited(spec.launch_id, process.pid, exit_code, self.last_lines()))

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip("\n")
                self._lines.append(line)
                self._echo(self._spec.launch_id, line)


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for a role: output unbuffered, and the same code importable.

    The working directory is kept off the module path, where a folder called `coordinator` would
    hide ours; the folder this package was found in is put on it instead.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    environment["PYTHONSAFEPATH"] = "1"
    home = str(Path(__file__).resolve().parents[2])
    if home not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = home if not inherited else home + os.pathsep + inherited
    return environment | dict(extra)
