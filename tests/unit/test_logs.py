from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from splitserve.logs import LimitedLog


def test_a_record_is_one_line_that_names_who_speaks() -> None:
    code = """
import logging
from splitserve.logs import set_up_logging
set_up_logging("decode 100%d-7", "info")
logging.getLogger("a.b").info("two\\nlines %s", 3)
logging.getLogger("a.b").debug("hidden")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    (line,) = done.stderr.splitlines()
    assert line.endswith(r" I decode 100%d-7 a.b: two\nlines 3")


def test_repetition_is_limited_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    limited = LimitedLog(logging.getLogger("x"), interval_s=10, clock=lambda: now)
    for _ in range(4):
        limited.warning("stray", "stray bytes")
    limited.warning("other", "something else")
    now = 11.0
    limited.warning("stray", "stray bytes")
    assert [record.getMessage() for record in caplog.records] == [
        "stray bytes",
        "something else",
        "stray bytes (3 more like this)",
    ]
