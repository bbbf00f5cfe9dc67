"""`splitserve serve`: the whole cluster as child processes of this one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from splitserve.commands.options import with_flags
from splitserve.errors import ConfigError, LaunchError

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
    show_settings(settings, sys.stdout if print_config else sys.stderr)
    if not print_config:
        raise typer.Exit(run_here(settings))


def one_model(positional: str | None, option: str | None) -> str | None:
    """MODEL and --model are two ways to say one thing. Raises ConfigError when they differ."""
    if positional and option and positional != option:
        raise ConfigError(f"two models: {positional} and --model {option}; one cluster serves one")
    return positional or option


def show_settings(settings: ServeSettings, stream: Any) -> None:
    import yaml

    yaml.safe_dump(dict(settings.document), stream, sort_keys=False, default_flow_style=None)
    stream.flush()


def run_here(settings: ServeSettings) -> int:
    """Start the cluster, wait for its end; the exit code. Raises LaunchError when it fails."""
    from splitserve.launch.local import local_launcher
    from splitserve.logs import set_up_logging
    from splitserve.process import on_signals

    set_up_logging("launcher", settings.log_level)
    console = Console(stderr=True)
    with console.status(f"preparing {settings.model}"):
        launcher = local_launcher(settings)
    signals_seen = []

    def on_signal(number: int) -> None:
        signals_seen.append(number)
        if len(signals_seen) == 1:
            launcher.request_stop()
        else:
            launcher.kill()

    with on_signals(on_signal):
        try:
            with console.status("starting the coordinator and the workers"):
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


def _ready_line(settings: ServeSettings, base_url: str) -> str:
    workers = f"{settings.prefill.num_workers} prefill, {settings.decode.num_workers} decode"
    return f"ready: {settings.model} at {base_url} ({workers}); Ctrl-C stops it"
