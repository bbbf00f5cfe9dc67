from __future__ import annotations

import dataclasses
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from splitserve.errors import ConfigError
from splitserve.profiling.collected import Profile
from splitserve.profiling.plots import MAX_POINTS, thinned
from splitserve.profiling.report import html_report, require_plots
from splitserve.profiling.verdict import cluster_verdict, worker_verdicts
from tests.unit.profiling.profiles import profile_of
from tests.unit.profiling.recorded import DECODE_BOUND, PREFILL_BOUND, Load

SECTIONS = (
    "summary",
    "requests",
    "workers",
    "roofline",
    "breakdown",
    "occupancy",
    "kv",
    "transfers",
    "classes",
)


class Reader(HTMLParser):
    """Owns what a browser would make of a document: its elements, its ids, its text."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: set[str] = set()
        self.loads: list[str] = []
        self.text = ""
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            local = (value or "").startswith("#")
            if name.split(":")[-1] in ("src", "href", "srcset", "data", "poster") and not local:
                self.loads.append(f"{tag} {name}={value}")

    def handle_data(self, data: str) -> None:
        self.text += data


def report_of(profile: Profile) -> str:
    workers = worker_verdicts(profile)
    return html_report(profile, workers, cluster_verdict(workers), "2026-01-01 10:00")


@pytest.fixture(scope="module")
def document() -> str:
    return report_of(profile_of(DECODE_BOUND))


def test_every_section_and_plot_is_there(document: str) -> None:
    reader = Reader(document)
    assert reader.ids.issuperset(SECTIONS)
    assert reader.tags.count("svg") == 5
    text = " ".join(reader.text.split())
    assert "The decode pool binds: memory" in text
    assert "The prefill pool has work 45 % of the time, and it has time to spare." in text
    assert "First: " in text
    assert "utilisation (presence)" in text
    assert "saturation (memory roof)" in text
    for worker in profile_of(DECODE_BOUND).workers:
        assert worker.facts.worker_id in text


def test_it_loads_nothing(document: str) -> None:
    reader = Reader(document)
    assert reader.loads == []
    assert not {"script", "link", "img", "iframe", "object", "embed"}.intersection(reader.tags)
    assert "@import" not in document
    assert all(place.startswith("#") for place in re.findall(r"url\(([^)]*)", document))
    assert "default-src 'none'" in document
    addresses = set(re.findall(r"https?://[^\"'\s<>]+", document))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_names_from_the_cluster_stay_names() -> None:
    name = '--><script>alert("$\\frac{1$")</script><img src=http://e/x>&amp;'
    profile = profile_of(dataclasses.replace(PREFILL_BOUND, duration_s=3.0), prefix=name)
    reader = Reader(report_of(profile))
    assert not {"script", "img"}.intersection(reader.tags)
    assert reader.loads == []
    assert f"Where the time goes: {name}smollm2-135m" in reader.text


@pytest.mark.parametrize(
    "profile",
    [
        profile_of(Load(duration_s=0.01, requests_per_s=0.001)),
        dataclasses.replace(profile_of(PREFILL_BOUND), workers=(), requests=(), observed_s=0.0),
        profile_of(dataclasses.replace(DECODE_BOUND, joins_at=5.0, leaves_at=3.0)),
    ],
    ids=["nothing happened", "nobody there", "one left and one joined"],
)
def test_any_profile_makes_a_report(profile: Profile) -> None:
    assert Reader(report_of(profile)).ids.issuperset({"summary", "roofline", "transfers"})


def test_a_long_profile_is_thinned_out() -> None:
    points = np.arange(100_000)
    kept = thinned(points)
    assert len(kept) == MAX_POINTS
    assert (kept[0], kept[-1]) == (0, 99_999)
    long = dataclasses.replace(PREFILL_BOUND, duration_s=250.0, requests_per_s=0.5)
    assert len(report_of(profile_of(long))) < 1_000_000


def test_without_the_extra_it_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"needs matplotlib.*splitserve\[plots\]"):
        require_plots()
