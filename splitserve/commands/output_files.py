"""Files that a command writes at its end. Whether that will do is told before the wait."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

from splitserve.errors import ConfigError


def check_output_files(files: Mapping[str, Path | None]) -> None:
    """By what each of them is ("the report"); None is not asked for. A file that is there keeps
    what it holds. Raises ConfigError."""
    given = {what: path for what, path in files.items() if path is not None}
    for path in given.values():
        _check(path)
    for (what, path), (other, other_path) in combinations(given.items(), 2):
        if path.resolve() == other_path.resolve() and (path.is_file() or not path.exists()):
            raise ConfigError(f"{path} can't be {what} and {other}")


def _check(path: Path) -> None:
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder} to write {path} to")
    if path.exists() and not path.is_file():  # a folder, or a device, which opening may disturb
        if path.is_dir() or not os.access(path, os.W_OK):
            raise ConfigError(f"{path} can't be written")
        return
    is_new = not path.exists()
    try:
        path.open("ab").close()  # permissions alone say nothing of /proc, nor to root
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from error


def write_output(path: Path, text: str) -> None:
    """Raises ConfigError, as when the disk is full."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror}") from error
