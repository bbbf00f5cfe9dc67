"""Real servers in turns under a tiny load: each is up alone, and gone when the next one starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.compare import main
from tests.tiny_models import make_tiny_llama
from tests.unit.bench.test_servers import free_port

LOAD = "--workload w1 --num-requests 6 --prompt-tokens 24 --output-tokens 8 --concurrency 3"


def test_two_modes_are_compared_and_a_failure_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_llama(tmp_path / "model", vocab_size=2048)
    serve = f"splitserve serve {model} --port {free_port()}"  # one port: they are never up together
    arguments = [*LOAD.split(), "--vocab-size", "2048", "--repeats", "1"]
    arguments += ["--server", f"alone={serve} --prefill 0", "--server", f"split={serve}"]
    arguments += ["--server", f"broken={serve} --block-size 0"]
    assert main([*arguments, "--json", str(tmp_path / "all.json")]) == 1
    document = json.loads((tmp_path / "all.json").read_text())
    alone, split, broken = document["turns"]
    for turn in (alone, split):
        assert turn["failure"] is None
        assert (turn["report"]["num_completed"], turn["report"]["errors"]) == (6, {})
        assert turn["report"]["numbers"]["output_tokens"] == 6 * 8
        assert 0 <= turn["busy_others"] <= 1
        assert turn["version"]
    assert "--block-size" in broken["failure"]
    assert broken["busy_others"] is None
    ratio = document["ratios"]["split"]["output_tokens_per_s"]
    rates = [turn["report"]["numbers"]["output_tokens_per_s"] for turn in (alone, split)]
    assert ratio["median"] == pytest.approx(rates[1] / rates[0])
    said = capsys.readouterr().out
    assert "| split / alone" in said
    assert "broken (0 of 1 runs)" in said and "FAILED: broken: it exited with code" in said
