"""`splitserve up` and `down`: the cluster on Ray."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from splitserve.commands.options import with_flags
from splitserve.commands.serve import show_settings
from splitserve.errors import ConfigError

if TYPE_CHECKING:
    from types import ModuleType

    from splitserve.settings import RaySettings

_ONE_WAIT_S = 2.0  # between two looks at whether it is still up


@with_flags
def up(
    config: Path = typer.Argument(
        ..., metavar="CONFIG", help="A YAML file, as deploy/splitserve.yaml."
    ),
    print_config: bool = typer.Option(False, help="Print the resolved settings, and end."),
    **given: Any,
) -> None:
    """Start a cluster on Ray; returns when it is ready, and the cluster stays.

    With --ray-address local, a Ray of its own is started and this command stays in the foreground.
    """
    from splitserve.settings import read_config_file, resolve

    settings = resolve(given, file=read_config_file(config))
    show_settings(settings, sys.stdout if print_config else sys.stderr)
    if print_config:
        return
    ray_cluster = _ray_cluster()
    with Console(stderr=True).status("waiting for Ray to place and start the processes"):
        base_url = ray_cluster.up(settings)
    print(f"ready: {settings.model} at {base_url}", flush=True)
    if settings.ray.address == "local":
        print("Ctrl-C ends it, and its Ray", file=sys.stderr, flush=True)
        _stay(ray_cluster, settings.ray)


def down(
    name: str | None = typer.Argument(None, help="The cluster's name on Ray. Default: default."),
    config: Path | None = typer.Option(None, help="The file it was started from."),
    ray_address: str | None = typer.Option(None, help="Ray cluster: auto, or host:port."),
    ray_namespace: str | None = typer.Option(None, help="Ray namespace."),
) -> None:
    """End a cluster that `up` started."""
    from splitserve.settings import read_config_file, resolve_ray

    given = {"ray_name": name, "ray_address": ray_address, "ray_namespace": ray_namespace}
    settings = resolve_ray(given, file=read_config_file(config) if config else None)
    ray_cluster = _ray_cluster()
    with Console(stderr=True).status(f"ending {settings.name}"):
        ray_cluster.down(settings)
    print(f"{settings.name} is down", flush=True)


def _ray_cluster() -> ModuleType:
    try:
        from splitserve.launch import ray_cluster
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}; Ray is an extra: pip install 'splitserve[ray]'") from error
    return ray_cluster


def _stay(ray_cluster: ModuleType, settings: RaySettings) -> None:
    """Keep this process, and with it the Ray it started, until a signal or a `down`."""
    from splitserve.process import on_signals

    told = threading.Event()
    with on_signals(lambda _number: told.set()):
        while ray_cluster.is_up(settings):
            if told.wait(_ONE_WAIT_S):
                ray_cluster.down(settings)
