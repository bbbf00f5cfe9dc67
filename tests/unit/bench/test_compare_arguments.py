"""What is wrong with a comparison is said in one line, before any server is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.compare import main
from tests.unit.bench.test_command import FOUR
from tests.unit.scripted_server import Exchange, scripted_server
from tests.unit.test_bench import answer

NEVER = "--server a=/no/such/program"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--repeats 0", "--repeats 0: it must be 1 or more"),
        ("--servers /nope.yaml", "can't read the servers in /nope.yaml"),
        ("--servers /", "can't read the servers in /"),
        ("--json /no/such/folder/x.json", "there is no folder /no/such/folder"),
        ("--plot /no/such/folder/x.svg", "there is no folder /no/such/folder"),
        ("--json /proc/x.json", "/proc/x.json can't be written"),
        ("--json /", "/ can't be written"),
    ],
)
def test_nonsense_is_refused_before_the_first_run(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*NEVER.split(), *arguments.split()]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and message in said.err
    assert len(said.err.splitlines()) == 1 and said.out == ""


def test_a_file_that_can_be_written_is_not_touched_by_looking(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("{}")
    checked = ["--json", str(kept), "--plot", str(tmp_path / "no" / "plot.svg")]
    assert main([*NEVER.split(), *checked]) == 2
    assert kept.read_text() == "{}"
    fresh = ["--json", str(tmp_path / "fresh.json"), "--plot", str(tmp_path / "no" / "plot.svg")]
    assert main([*NEVER.split(), *fresh]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]


def test_a_full_disk_ends_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*NEVER.split(), "--repeats", "2", "--json", "/dev/full"]) == 1
    said = capsys.readouterr()
    assert "repeat 2 of 2" in said.out
    assert set(said.err.splitlines()) == {"error: can't write /dev/full: No space left on device"}


def peer(exchange: Exchange) -> None:
    if exchange.path == "/v1/completions":
        answer(exchange)
    else:
        exchange.json({"version": "0.32"})


def test_two_sittings_share_no_prompt_and_the_file_says_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    sent = []
    for _ in range(2):
        with scripted_server(peer) as server:
            list_of_servers = tmp_path / "servers.yaml"
            list_of_servers.write_text(f"a: {{url: {server.base_url}, health: /up}}")
            options = ["--servers", str(list_of_servers), "--json", str(path), "--repeats", "1"]
            assert main([*FOUR, *options]) == 0
            bodies = (exchange.body for exchange in server.exchanges)
            sent.append({tuple(body["prompt"]) for body in bodies if body})
    assert len(sent[0]) == len(sent[1]) > 4 and not sent[0] & sent[1]
    document = json.loads(path.read_text())
    (turn,) = document["turns"]
    assert turn["seed"] == document["spec"]["seed"]
    assert document["measured_on"]["num_cores"] >= 1
    assert document["servers"][0]["health"] == "/up"
    assert turn["version"] == "0.32"
