"""`splitserve serve`: the whole cluster as child processes of this one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from splitserve.commands.options import with_flags
from splitserve.errors import ConfigError, LaunchError
from splitserve.flags import all_flags

if TYPE_CHECKING:
    from splitserve.settings import ServeSettings

EXIT_INTERRUPTED = 130  # as a shell reports Ctrl-C


@with_flags
def serve(
    model_name: str | None = typer.Argument(None, metavar="MODEL", help="As --model."),
    config: Path | None = typer.Option(None, help="A YAML file with any of these settings."),
    print_config: bool = typer.Option(False, help="Print the resolved settings, and end."),
    **given: Any,
) -> None:
    """Serve a model from this machine, in the foreground, until Ctrl-C."""
    from splitserve.settings import read_config_file, resolve

    given["model"] = one_model(model_name, given["model"])
    settings = resolve(given, file=read_config_file(config) if config else None)
    if print_config:
        show_settings(settings, sys.stdout)
        return
    raise typer.Exit(run_here(settings))


def one_model(positional: str | None, option: str | None) -> str | None:
    """MODEL and --model are two ways to say one thing. Raises ConfigError when they differ."""
    if positional and positional.endswith((".yaml", ".yml")) and not Path(positional).is_dir():
        raise ConfigError(f"{positional} is not a model; did you mean --config {positional}?")
    if positional and option and positional != option:
        raise ConfigError(f"two models: {positional} and --model {option}; one cluster serves one")
    return positional or option


def show_settings(settings: ServeSettings, stream: Any) -> None:
    """All of them, as a config file that says the same."""
    import yaml

    yaml.safe_dump(dict(settings.document), stream, sort_keys=False, default_flow_style=None)
    stream.flush()


def changed_settings(document: Mapping[str, Any]) -> str:
    """One line: what differs from the defaults, as flags; keys of clients are masked there."""
    parts = []
    for flag in all_flags().values():
        value: Any = document
        for name in flag.path:
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None and value != flag.default:
            shown = ",".join(map(str, value)) if isinstance(value, list) else value
            parts.append(f"{flag.key}={shown}")
    return f"settings: {', '.join(parts)}; --print-config shows all"


def run_here(settings: ServeSettings) -> int:
    """Start the cluster, wait for its end; the exit code. Raises LaunchError when it fails."""
    from splitserve.launch.local import local_launcher
    from splitserve.logs import set_up_logging
    from splitserve.process import on_signals

    set_up_logging("launcher", settings.log_level)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with _telling(console, f"looking up {settings.model}"):
        launcher = local_launcher(settings)
    console.print(changed_settings(settings.document), markup=False)
    signals_seen = []

    def on_signal(number: int) -> None:
        signals_seen.append(number)
        if len(signals_seen) == 1:
            launcher.request_stop()
        else:
            launcher.kill()

    with on_signals(on_signal):
        try:
            with _telling(console, f"loading {settings.model}, often 20 to 50 s"):
                base_url = launcher.start()
        except LaunchError:
            if not signals_seen:
                raise
            return EXIT_INTERRUPTED
        print(_ready_line(settings, base_url), flush=True)
        launcher.wait()
    if launcher.failure is not None:
        raise launcher.failure
    return EXIT_INTERRUPTED if len(signals_seen) > 1 else 0


@contextmanager
def _telling(console: Console, what: str) -> Iterator[None]:
    """Say what takes a while: with a spinner on a terminal, else in a line."""
    if not console.is_terminal:
        console.print(f"{what} …", markup=False)
        yield
        return
    with console.status(f"{what} …"):
        yield


def _ready_line(settings: ServeSettings, base_url: str) -> str:
    workers = f"{settings.prefill.num_workers} prefill, {settings.decode.num_workers} decode"
    return f"ready: {settings.model} at {base_url} ({workers}); Ctrl-C stops it"
