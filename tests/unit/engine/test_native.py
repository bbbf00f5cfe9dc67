"""Compiling a kernel once, and doing without where that can't be."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from splitserve.engine import native
from splitserve.engine.native import library_path, load_library

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "seven.cpp"
    path.write_text('extern "C" int seven() { return 7; }\n')
    return path


@needs_compiler
def test_a_second_start_needs_no_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_library(source)
    assert first is not None and first.seven() == 7
    monkeypatch.setenv("PATH", "")
    again = load_library(source)
    assert again is not None and again.seven() == 7
    (left,) = library_path(source).parent.iterdir()
    assert left.suffix == ".so"


@needs_compiler
def test_another_source_or_another_cpu_is_compiled_anew(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_library(source)
    source.write_text('extern "C" int seven() { return 8; }\n')
    changed = load_library(source)
    assert changed is not None and changed.seven() == 8
    monkeypatch.setattr(native, "_cpu_flags", lambda: "flags: sse2")
    load_library(source)
    assert len(list(library_path(source).parent.iterdir())) == 3


def test_without_a_compiler_there_is_a_warning_and_no_library(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    with caplog.at_level(logging.WARNING):
        assert load_library(source) is None
    assert "seven.cpp" in caplog.text and "c++" in caplog.text


@needs_compiler
def test_what_the_compiler_says_is_in_the_warning(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source.write_text("this is not C++")
    assert load_library(source) is None
    assert "error" in caplog.text


def test_a_cache_that_is_not_a_directory_is_survived(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("in the way")
    assert load_library(source) is None
    assert "seven.cpp" in caplog.text


@needs_compiler
def test_a_broken_library_in_the_cache_is_built_again(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library_path(source).parent.mkdir(parents=True)
    library_path(source).write_bytes(b"half a file")
    library = load_library(source)
    assert library is not None and library.seven() == 7
    assert "built again" in caplog.text
