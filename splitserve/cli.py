"""The command line: `splitserve serve | up | down | scale | restart | status | chat | ...`."""

from __future__ import annotations

import sys

import typer

from splitserve import __version__
from splitserve.commands.bench import bench
from splitserve.commands.chat import chat
from splitserve.commands.errors import show_error
from splitserve.commands.plain_help import PlainCommand
from splitserve.commands.profile import profile
from splitserve.commands.ray import down, up
from splitserve.commands.running import restart, scale, status
from splitserve.commands.serve import serve
from splitserve.errors import ConfigError, SplitserveError

app = typer.Typer(
    name="splitserve",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help and errors: a box cuts long names, also in a pipe
)
for command in (serve, up, down, scale, restart, status, chat, bench, profile):
    app.command(cls=PlainCommand)(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"splitserve {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False,
        "--version",
        callback=_show_version,
        is_eager=True,
        help="Print the version, and end.",
    ),
) -> None:
    """Serve a language model from a pool of prefill and a pool of decode workers."""


def main() -> None:
    """Entry point of the `splitserve` command. Exit code 1: it failed; 2: it was told nonsense."""
    try:
        app()
    except SplitserveError as error:
        show_error(error)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
