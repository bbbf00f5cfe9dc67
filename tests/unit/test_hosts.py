from __future__ import annotations

import pytest

from splitserve.hosts import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1", "[::1]"])
def test_only_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "*", "", "localhost.example.org"])
def test_others_too(host: str) -> None:
    assert not is_loopback(host)
