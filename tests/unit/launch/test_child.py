from __future__ import annotations

import os
import queue
import sys
from pathlib import Path

import pytest

from splitserve.errors import LaunchError
from splitserve.launch.child import ChildProcess, ChildSpec, Exited, child_environment


def run(module: str, tmp_path: Path, code: str) -> tuple[Exited, list[str]]:
    """Run `code` as a module, to its end."""
    (tmp_path / f"{module}.py").write_text(code)
    exits: queue.SimpleQueue[Exited] = queue.SimpleQueue()
    lines: list[str] = []
    environment = {"PYTHONPATH": str(tmp_path)}
    child = ChildProcess(
        ChildSpec("child-1", module, environment), exits.put, lambda _id, line: lines.append(line)
    )
    exited = exits.get(timeout=10)
    assert child.wait(0)
    return exited, lines


def test_output_is_passed_on_and_its_end_is_kept(tmp_path: Path) -> None:
    code = "import sys\nfor i in range(2000): print('line', i)\nsys.exit(5)\n"
    exited, lines = run("talks", tmp_path, code)
    assert (exited.launch_id, exited.exit_code) == ("child-1", 5)
    assert lines == [f"line {i}" for i in range(2000)]
    assert exited.last_lines.endswith("line 1998\nline 1999")
    assert len(exited.last_lines.encode()) <= 4096
    assert "child-1" in str(exited)
    assert "exited with code 5" in str(exited)


def test_traceback_and_bytes_that_are_no_text_are_kept(tmp_path: Path) -> None:
    code = "import os\nos.write(1, b'\\xff\\xfe' + b'x' * 9000 + b'\\n')\n"
    code += "raise RuntimeError('broken shard')\n"
    exited, _ = run("raises", tmp_path, code)
    assert exited.exit_code == 1
    assert "RuntimeError: broken shard" in exited.last_lines
    assert len(exited.last_lines.encode()) <= 4096


def test_a_signal_is_named(tmp_path: Path) -> None:
    exited, _ = run("dies", tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert exited.exit_code == -9
    assert "was killed by SIGKILL" in str(exited)


def test_child_has_a_process_group_of_its_own_and_a_safe_path(tmp_path: Path) -> None:
    code = "import os, sys\nprint(os.getpgid(0) == os.getpid(), sys.flags.safe_path)\n"
    _, lines = run("group", tmp_path, code)
    assert lines == ["True True"]


def test_working_directory_does_not_hide_our_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "coordinator.py").write_text("raise SystemExit('not ours')")
    monkeypatch.chdir(tmp_path)
    environment = child_environment({"X": "1"})
    home = str(Path(__file__).parents[3])
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == home
    assert environment["PYTHONSAFEPATH"] == environment["X"] == "1"


def test_what_can_not_be_started_is_a_launch_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    exits: queue.SimpleQueue[Exited] = queue.SimpleQueue()
    with pytest.raises(LaunchError, match=r"can't start child-1: .*No such file"):
        ChildProcess(ChildSpec("child-1", "x", {}), exits.put)
