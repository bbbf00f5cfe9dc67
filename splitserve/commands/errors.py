"""How every command says what went wrong."""

from __future__ import annotations

from rich.console import Console

from splitserve.errors import SplitserveError


def show_error(error: SplitserveError) -> None:
    """One line on stderr: the kind of error, and its message."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[red]splitserve: {type(error).__name__}:[/red] ", end="")
    console.print(str(error), markup=False)
