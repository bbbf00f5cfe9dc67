"""The wheel holds every module, and works from another directory without the source tree."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("splitserve", "coordinator", "prefill_worker", "decode_worker", "kv_transfer")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_file():  # a build must not write into the tree it is made from
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*build, "-w", str(folder), str(source)], check=True, capture_output=True, timeout=100
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


@pytest.mark.parametrize("pattern", ["*.py", "*.cpp"])
def test_every_source_file_is_in_the_wheel(installed: Path, pattern: str) -> None:
    ours, theirs = (
        {path.relative_to(root) for package in PACKAGES for path in (root / package).rglob(pattern)}
        for root in (ROOT, installed)
    )
    assert ours == theirs and ours


def test_roles_are_found_without_the_source_tree(installed: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import coordinator.server, prefill_worker.worker, decode_worker.worker, splitserve.cli\n"
        "print({m.__file__.startswith(sys.argv[1]) for m in (coordinator.server, splitserve.cli)})"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script, str(installed)],
        cwd=installed.parent,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.stdout.strip() == "{True}"
