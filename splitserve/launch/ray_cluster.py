"""The cluster on Ray: a detached launcher actor, and one actor for each worker process.

    splitserve up ──► LauncherActor (detached, named)
                        ├── the coordinator, its child process
                        └── WorkerActor, one a bundle of a placement group     (ray_workers.py)
                              └── the worker, its child process

Ray places and supervises; requests, tokens and KV go over ZeroMQ between the child processes. A
WorkerActor belongs to the launcher, and a child to its actor, so the end of one ends what is below.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from splitserve.errors import LaunchError
from splitserve.launch.hosted import HostedLauncher, Outcome
from splitserve.launch.ray_workers import RaySpawner, node_host

if TYPE_CHECKING:
    from splitserve.settings import RaySettings, ServeSettings

_CALL_TIMEOUT_S = 60.0  # a short call to an actor that runs
_PROBE_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


class LauncherActor(HostedLauncher):
    """The launcher of a cluster on Ray; detached, it outlives the command that made it."""

    def __init__(self, settings: ServeSettings) -> None:
        super().__init__(settings, node_host(), RaySpawner)


def connect(settings: RaySettings) -> None:
    """Join the Ray cluster, or start one (address "local"). Raises LaunchError."""
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    _check_reachable(settings.address)
    try:
        ray.init(settings.address, namespace=settings.namespace, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise LaunchError(
            f"can't join Ray at {settings.address}: {error}. Start one with `ray start --head`, or "
            "give --ray-address local. A cluster with token authentication wants RAY_AUTH_TOKEN."
        ) from error


def _check_reachable(address: str) -> None:
    """Raises LaunchError when nobody listens at host:port, which Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()) or "//" in address:
        return  # "auto", "local", or a form that Ray checks itself
    try:
        socket.create_connection((host, int(port)), _PROBE_TIMEOUT_S).close()
    except OSError as error:
        raise LaunchError(f"no Ray at {address}: {error}") from error


def up(settings: ServeSettings) -> str:
    """Start a cluster on Ray; its base URL, when ready. It stays when this process ends.

    Raises LaunchError: no room (naming wanted and available), a process that failed, or a cluster
    of that name which is up already. After a failure nothing is left.
    """
    connect(settings.ray)
    _clear_the_name(settings.ray)
    actor = _make_launcher(settings)
    limit_s = settings.start_timeout_s + settings.stop_grace_s + 2 * _CALL_TIMEOUT_S
    try:
        outcome: Outcome = _answer(actor.bring_up.remote(), limit_s)
        if outcome.base_url is None:
            raise LaunchError(outcome.failure or "the cluster did not start")
    except BaseException:
        _end_after_failure(actor)
        raise
    return outcome.base_url


def _clear_the_name(settings: RaySettings) -> None:
    """End what is left of a cluster of this name. Raises LaunchError when it is up."""
    previous = _find(settings)
    if previous is None:
        return
    try:
        if not _answer(previous.has_ended.remote(), _CALL_TIMEOUT_S):
            name = settings.name
            raise LaunchError(f"{name!r} is up or starting; `splitserve down {name}` ends it")
    except _ActorGoneError:
        return
    _end(previous)


def _make_launcher(settings: ServeSettings) -> Any:
    # Not soft: then Ray takes another node though this one has room.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {
        "name": actor_name(settings.ray),
        "namespace": settings.ray.namespace,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_concurrency": 8,
        "scheduling_strategy": here,  # so that its loopback is the user's
    }
    try:
        return ray.remote(LauncherActor).options(**options).remote(settings)
    except ValueError as error:  # another `up` was quicker
        raise LaunchError(f"{settings.ray.name!r} can't be made on Ray: {error}") from error


def is_up(settings: RaySettings) -> bool:
    """Whether there is a cluster of this name on the Ray that this process is connected to."""
    return _find(settings) is not None


def down(settings: RaySettings) -> None:
    """End a cluster on Ray, with its own grace; returns when its processes are gone.

    Raises LaunchError when there is none, or when it could not be stopped and was killed.
    """
    connect(settings)
    actor = _find(settings)
    if actor is None:
        raise LaunchError(f"no cluster named {settings.name!r} in namespace {settings.namespace!r}")
    _end(actor)


def _end(actor: Any) -> None:
    """Stop a launcher, then end its actor. One that is gone took what it owned with it."""
    try:
        grace_s: float = _answer(actor.stop_grace_s.remote(), _CALL_TIMEOUT_S)
        _answer(actor.stop.remote(), 3 * grace_s + _CALL_TIMEOUT_S)
    except _ActorGoneError:
        return
    finally:
        ray.kill(actor)


def _end_after_failure(actor: Any) -> None:
    """As `_end`; a second failure is logged, for the first is what the user must hear."""
    try:
        _end(actor)
    except LaunchError as error:
        log.warning("while cleaning up: %s", error)


class _ActorGoneError(LaunchError):
    """The actor that was called is dead."""


def _answer(running: Any, timeout_s: float) -> Any:
    """What a call to the launcher's actor returns. Raises LaunchError, never an error of Ray's."""
    try:
        return ray.get(running, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise LaunchError(f"the launcher on Ray did not answer within {timeout_s:g} s") from error
    except ray.exceptions.RayActorError as error:
        reason = str(error).partition("\n")[0]
        raise _ActorGoneError(f"the launcher on Ray is dead: {reason}") from error
    except ray.exceptions.RayTaskError as error:
        raise LaunchError(f"the launcher on Ray failed: {error.cause!r}") from error
    except ray.exceptions.RayError as error:
        raise LaunchError(f"calling the launcher on Ray failed: {error}") from error


def _find(settings: RaySettings) -> Any | None:
    try:
        return ray.get_actor(actor_name(settings), namespace=settings.namespace)
    except ValueError:
        return None


def actor_name(settings: RaySettings) -> str:
    return f"splitserve-launcher-{settings.name}"
