"""These tests run where triton was imported to compile, into a cache of their own: see
../children.py."""

from __future__ import annotations

import os

_CHILD = "TRITON_CACHE_DIR" in os.environ and "TRITON_INTERPRET" not in os.environ
collect_ignore_glob = [] if _CHILD else ["test_*.py"]
