"""Tests that need a process of their own: whether triton interprets is settled when it loads."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="splitserve[triton] is not installed"
)
_KERNELS = Path(__file__).parent


def run_interpreted(*names: str) -> None:
    """Run tests with kernels interpreted on the CPU, one operation at a time in numpy."""
    _run([f"interpreted/{name}" for name in names], TRITON_INTERPRET="1")


def run_compiled(cache: Path) -> None:
    """Run tests with kernels that can be compiled, which needs no GPU."""
    # Without the second variable, triton 3.9 warns that what it defaults to will change.
    _run(["compiled"], TRITON_CACHE_DIR=str(cache), TRITON_DEFAULT_FP_FUSION="1")


def _run(paths: list[str], **variables: str) -> None:
    others = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths],
        cwd=_KERNELS,
        # One thread: tensors are tiny, and threads would only wait for each other.
        env=others | variables | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]
