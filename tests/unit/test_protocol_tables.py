"""docs/protocol.md lists every message with exactly its fields, under its receiver."""

import dataclasses
import re
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from splitserve.config import Fingerprint, KVLayout, Promises
from splitserve.profiling.evidence import Evidence
from splitserve.request import Sampling, TokenLogprobs
from splitserve.wire import messages as m
from splitserve.work import Ceilings

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
SECTIONS = {
    "To a worker (control)": m.ToWorker,
    "To the coordinator (control)": m.ToCoordinator,
    "To the launcher (control)": m.ToLauncher,
    "Prefill → decode (data)": m.PrefillToDecode,
    "Decode → prefill (data)": m.DecodeToPrefill,
}
PARTS = (
    m.Choice,
    m.TokenRow,
    m.WorkerFacts,
    m.WorkerStats,
    Ceilings,
    Evidence,
    m.ObservedWindow,
    m.KernelEvent,
    m.Region,
    m.HandoffTimes,
    m.Begun,
    m.Held,
    m.Launched,
    KVLayout,
    Fingerprint,
    Promises,
    Sampling,
    TokenLogprobs,
)


def documented(section: str) -> dict[str, list[str]]:
    text = DOCUMENT.read_text(encoding="utf-8").split(f"### {section}\n")[1].split("\n### ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \| [^|]*\S[^|]* \|$", text, flags=re.MULTILINE)
    return {name: re.findall(r"`(\w+)`", fields) for name, fields in rows}


@pytest.mark.parametrize("section", SECTIONS)
def test_tables_match_the_code(section: str) -> None:
    assert documented(section) == fields_of(typing.get_args(SECTIONS[section]))


def test_parts_match_the_code() -> None:
    assert documented("Parts") == fields_of(PARTS)


def fields_of(kinds: Iterable[type[Any]]) -> dict[str, list[str]]:
    return {kind.__name__: [f.name for f in dataclasses.fields(kind)] for kind in kinds}
