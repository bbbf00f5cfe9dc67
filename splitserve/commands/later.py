"""Commands whose names are fixed and whose work is still to come."""

from __future__ import annotations

import typer
from rich.console import Console

_EXIT_NOT_BUILT = 2


def profile() -> None:
    """Show where the time of a step goes (from version 0.3 on)."""
    _not_built("profile", "0.3")


def _not_built(command: str, version: str) -> None:
    Console(stderr=True).print(f"splitserve {command} is not built yet; it comes with {version}")
    raise typer.Exit(_EXIT_NOT_BUILT)
