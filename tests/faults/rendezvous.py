"""How a decode worker and a shim in the test's process find each other: through files."""

from __future__ import annotations

from pathlib import Path

from tests.waiting import wait_until

_SHIMMED = "shimmed"  # there is a shim in this cluster


def announce_shim(directory: Path) -> None:
    """From now on decode workers wait for an address to give out instead of their own."""
    (directory / _SHIMMED).touch()


def waiting_workers(directory: Path) -> dict[int, str]:
    """Decode workers that wait for an address: their real ones, by pid."""
    found = {}
    for path in directory.glob("real-*"):
        pid = int(path.name.removeprefix("real-"))
        if not (directory / f"shown-{pid}").exists():
            found[pid] = path.read_text()
    return found


def show_address(directory: Path, pid: int, address: str) -> None:
    _write(directory / f"shown-{pid}", address)


def address_through_shim(directory: Path, pid: int, address: str) -> str:
    """What this worker should give out as its address."""
    if not (directory / _SHIMMED).exists():
        return address
    shown = directory / f"shown-{pid}"
    _write(directory / f"real-{pid}", address)
    wait_until(shown.exists, 30, "the shim's address")
    return shown.read_text()


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    new = path.parent / f".{path.name}"
    new.write_text(text)
    new.rename(path)
