"""These tests run where TRITON_INTERPRET was 1 before triton was imported: see ../children.py."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
