from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from splitserve.process import (
    available_cores,
    describe_exit,
    num_usable_cores,
    on_signals,
    python_executable,
)
from tests.unit.launch.fakes import is_running
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, cwd=ROOT
    )


def test_child_dies_with_its_parent() -> None:
    child = "import os, signal; from splitserve.process import die_with_parent; "
    child += "die_with_parent({parent}); print(os.getpid(), flush=True); signal.pause()"
    parent = f"""
import os, subprocess, sys
code = {child!r}.replace("{{parent}}", str(os.getpid()))
process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
print(process.stdout.readline(), end="", flush=True)
os.kill(os.getpid(), 9)
"""
    done = run_python(parent)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: not is_running(int(done.stdout)), 5, "end of the child")


def test_child_whose_parent_is_gone_already_dies_at_once() -> None:
    done = run_python("from splitserve.process import die_with_parent; die_with_parent(1 << 22)")
    assert done.returncode == -signal.SIGKILL


def test_no_parent_means_no_watch() -> None:
    done = run_python("from splitserve.process import die_with_parent; die_with_parent(None)")
    assert done.returncode == 0


def test_pinning_limits_the_cores() -> None:
    core = available_cores()[-1]
    code = f"""
from splitserve.process import available_cores, pin_to_cores
pin_to_cores(None)
pin_to_cores([{core}])
print(available_cores())
"""
    assert run_python(code).stdout.strip() == f"({core},)"


def test_signals_come_to_the_action_and_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[int] = []
    with on_signals(seen.append):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert seen == [signal.SIGTERM, signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "exited with code 0"), (-15, "was killed by SIGTERM"), (-99, "was killed by signal 99")],
)
def test_exits_in_words(code: int, text: str) -> None:
    assert describe_exit(code) == text


def test_interpreter_is_this_one() -> None:
    assert Path(python_executable()).samefile(sys.executable)


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = """
import sys, splitserve, splitserve.cli
heavy = {"torch", "transformers", "zmq", "httpx", "ray", "numpy", "fastapi"} & set(sys.modules)
print(sorted(heavy), splitserve.SamplingParams.__name__, splitserve.Cluster.__name__)
assert dir(splitserve) == sorted(splitserve.__all__)
assert "torch" not in sys.modules
"""
    assert run_python(code).stdout.strip() == "[] SamplingParams Cluster", run_python(code).stderr


def test_a_process_may_open_as_many_files_as_its_hard_limit_says() -> None:
    script = (
        "import resource as r\n"
        "from splitserve.process import allow_many_files\n"
        "_, hard = r.getrlimit(r.RLIMIT_NOFILE)\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (64, hard))\n"
        "allow_many_files()\n"
        "print(r.getrlimit(r.RLIMIT_NOFILE) == (hard, hard))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30
    )
    assert done.stdout == "True\n", done.stderr


def test_usable_cores_are_no_more_than_those_there_are() -> None:
    assert 1 <= num_usable_cores() <= len(available_cores())
    one_of_them = (
        "import os; from splitserve.process import *; pin_to_cores([available_cores()[0]])"
    )
    done = run_python(f"{one_of_them}; print(num_usable_cores())")
    assert done.stdout == "1\n"
