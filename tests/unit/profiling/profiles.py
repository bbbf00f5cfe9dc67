"""Profiles for tests, read from recordings the way the command reads them."""

from __future__ import annotations

from splitserve.profiling.collected import Collector, Profile
from tests.unit.profiling.recorded import Load, stream


def profile_of(load: Load, prefix: str = "") -> Profile:
    collector = Collector()
    collector.feed(stream(load, prefix))
    return collector.profile()
