"""From flags, environment and file to one frozen `ServeSettings`, or a ConfigError that says why.

Order: flag, environment variable, file, default. A pool's own value beats the shared one where both
come from the same source; from a higher source the shared one beats the pool's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from splitserve.config import ROLES, EngineConfig, Liveness, Role
from splitserve.errors import ConfigError
from splitserve.flags import ENGINE_KEYS, Flag, all_flags
from splitserve.hosts import is_loopback
from splitserve.settings_values import closest, convert, flatten, nest

# Variables of this package that are not flags: roles and clients read them.
OTHER_VARIABLES = (
    "SPLITSERVE_BASE_URL",
    "SPLITSERVE_ROLE_CONFIG",
    "SPLITSERVE_READY_FD",
)
# What the tables offer and this version can't do yet.
NOT_BUILT: Mapping[str, tuple[Any, ...]] = {
    "transport": ("shm", "collective", "nixl"),
}


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """One pool of workers: how many, how each computes, and what Ray gives each."""

    num_workers: int
    engine: EngineConfig  # `model` is the name as given, until the launcher resolves it
    devices: tuple[int, ...] = ()  # GPU numbers; empty: CPU
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    resources: Mapping[str, float] | None = None
    label_selector: Mapping[str, str] | None = None
    accelerator_type: str | None = None


@dataclass(frozen=True, slots=True)
class RaySettings:
    address: str
    namespace: str
    name: str
    placement_timeout_s: float


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """All that a cluster is told, resolved and checked. `document` is what --print-config prints:
    a config file that says the same, keys of clients masked."""

    model: str
    served_model_names: tuple[str, ...]
    host: str
    port: int
    api_keys: tuple[str, ...]
    prefill: PoolSettings
    decode: PoolSettings
    transport: Literal["tcp"]
    liveness: Liveness
    max_restarts: int
    drain_grace_s: float
    request_timeout_s: float
    max_queue: int
    router: Literal["round_robin", "least_loaded"]
    generation_config: Literal["auto", "vllm"]
    log_level: str
    start_timeout_s: float
    stop_grace_s: float
    ray: RaySettings
    document: Mapping[str, Any]

    def pool(self, role: Role) -> PoolSettings:
        return self.prefill if role == "prefill" else self.decode


def read_config_file(path: str | Path) -> dict[str, Any]:
    """The YAML mapping in a file. Raises ConfigError naming the file."""
    import yaml

    from splitserve.yaml_loading import load_yaml

    try:
        content = load_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"can't read the config file {path}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, got a {type(content).__name__}")
    return content


def resolve(
    given: Mapping[str, Any],
    *,
    file: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> ServeSettings:
    """Resolve and check everything. `given` holds flags by key; None and () mean not given.

    Raises ConfigError for an unknown key, a wrong type, a value out of range, or settings that
    can't work together; it names the flag, key or variable and the limit.
    """
    values = {key: flag.default for key, flag in all_flags().items()}
    _lay_over(values, _from_file(file or {}))
    _lay_over(values, _from_environment(os.environ if environ is None else environ))
    _lay_over(values, _from_flags(given))
    _check_served(values)
    settings = _build(values)
    _check_pools(settings)
    return settings


def resolve_ray(
    given: Mapping[str, Any],
    *,
    file: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> RaySettings:
    """Where a cluster on Ray is, and nothing else: only the `ray` section of a file and the
    variables of its keys are read, so that what starting needs is not asked for here.

    Raises ConfigError as `resolve` does.
    """
    flags = {key: flag for key, flag in all_flags().items() if flag.path[0] == "ray"}
    variables = os.environ if environ is None else environ
    values = {key: flag.default for key, flag in flags.items()}
    values |= _from_file({"ray": section} if (section := (file or {}).get("ray")) else {})
    values |= _from_environment(
        {flag.variable: variables.get(flag.variable, "") for flag in flags.values()}
    )
    values |= _from_flags(given)
    return _ray(values)


def _lay_over(values: dict[str, Any], layer: Mapping[str, Any]) -> None:
    """Put a higher source's values over `values`. A shared one also hides the pools' below it."""
    for key in layer:
        if key == "model" or key in ENGINE_KEYS:
            values.update({f"{role}_{key}": None for role in ROLES})
    values.update(layer)


def _from_file(file: Mapping[str, Any]) -> dict[str, Any]:
    by_path = {flag.path: flag for flag in all_flags().values()}
    found = {}
    for path, raw in flatten(file, by_path):
        flag = by_path.get(path)
        name = ".".join(path)
        if flag is None:
            names = {".".join(known[:depth]) for known in by_path for depth in (1, len(known))}
            raise ConfigError(f"unknown key {name!r} in the config file{closest(name, names)}")
        found[flag.key] = None if raw is None else convert(flag, raw, f"{name} (config file)")
    return {key: value for key, value in found.items() if value is not None}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    flags = {flag.variable: flag for flag in all_flags().values() if not flag.file_only}
    found = {}
    for name, raw in environ.items():
        if not name.startswith("SPLITSERVE_") or name in OTHER_VARIABLES or raw == "":
            continue
        if name not in flags:
            hint = closest(name, (*flags, *OTHER_VARIABLES))
            raise ConfigError(f"unknown environment variable {name}{hint}")
        found[flags[name].key] = convert(flags[name], raw, name)
    return found


def _from_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    flags = all_flags()
    found = {}
    for key, raw in given.items():
        if key not in flags:
            raise ConfigError(f"unknown setting {key!r}{closest(key, flags)}")
        if raw is None or raw in ((), []):
            continue
        found[key] = convert(flags[key], raw, flags[key].option)
    return found


def _check_served(values: Mapping[str, Any]) -> None:
    if not values["model"]:
        raise ConfigError("no model: name one, as in `splitserve serve smollm2-135m`")
    if not is_loopback(values["host"]) and not values["api_key"]:
        raise ConfigError(
            f"--host {values['host']} can be reached from other machines: give an --api-key, "
            "or keep the default 127.0.0.1"
        )
    if values["heartbeat_timeout_s"] < 2 * values["heartbeat_interval_s"]:
        raise ConfigError(
            f"--heartbeat-timeout-s {values['heartbeat_timeout_s']} must be at least twice "
            f"--heartbeat-interval-s {values['heartbeat_interval_s']}"
        )
    for key, missing in NOT_BUILT.items():
        for name in (key, f"prefill_{key}", f"decode_{key}"):
            if values.get(name) in missing:
                option = all_flags()[name].option
                raise ConfigError(f"{option} {values[name]} is not built yet in this version")


def _check_pools(settings: ServeSettings) -> None:
    prefill, decode = settings.prefill, settings.decode
    for role in ROLES:
        _check_device(role, settings.pool(role))
    if prefill.num_workers == 0:
        return
    for name in ("model", "dtype", "block_size"):
        ours, theirs = getattr(prefill.engine, name), getattr(decode.engine, name)
        if ours != theirs and "auto" not in (ours, theirs):
            raise ConfigError(
                f"{name} must be the same in both pools: prefill has {ours}, decode {theirs}"
            )


def _check_device(role: Role, pool: PoolSettings) -> None:
    backend, on_gpu = pool.engine.attention_backend, bool(pool.devices or pool.num_gpus)
    if pool.num_workers == 0:
        return
    if backend == "triton" and not on_gpu:
        raise ConfigError(f"attention_backend triton needs a GPU, as in --{role}-devices 0")
    if backend == "cpu" and on_gpu:
        raise ConfigError(f"attention_backend cpu is for CPUs, but {role} workers have GPUs")


def _pool(role: Role, values: Mapping[str, Any]) -> PoolSettings:
    def own(key: str) -> Any:
        return values[f"{role}_{key}"]

    engine = {key: values[key] if own(key) is None else own(key) for key in ENGINE_KEYS}
    return PoolSettings(
        num_workers=values[role],
        engine=EngineConfig(model=own("model") or values["model"], **engine),
        devices=own("devices") or (),
        num_cpus=own("num_cpus"),
        num_gpus=own("num_gpus"),
        resources=own("resources"),
        label_selector=own("label_selector"),
        accelerator_type=own("accelerator_type"),
    )


def _build(values: Mapping[str, Any]) -> ServeSettings:
    pools = {role: _pool(role, values) for role in ROLES}
    return ServeSettings(
        model=values["model"],
        served_model_names=values["served_model_name"] or (values["model"],),
        host=values["host"],
        port=values["port"],
        api_keys=values["api_key"] or (),
        prefill=pools["prefill"],
        decode=pools["decode"],
        transport="tcp",  # auto is tcp until there is another to pick
        liveness=Liveness(
            heartbeat_interval_s=values["heartbeat_interval_s"],
            heartbeat_timeout_s=values["heartbeat_timeout_s"],
            stall_timeout_s=values["stall_timeout_s"],
            max_step_s=values["max_step_s"],
        ),
        max_restarts=values["max_restarts"],
        drain_grace_s=values["drain_grace_s"],
        request_timeout_s=values["request_timeout_s"],
        max_queue=values["max_queue"],
        router=values["router"],
        generation_config=values["generation_config"],
        log_level=values["log_level"],
        start_timeout_s=values["start_timeout_s"],
        stop_grace_s=values["stop_grace_s"],
        ray=_ray(values),
        document=_document(values),
    )


def _ray(values: Mapping[str, Any]) -> RaySettings:
    return RaySettings(
        values["ray_address"],
        values["ray_namespace"],
        values["ray_name"],
        values["ray_placement_timeout_s"],
    )


def _document(values: Mapping[str, Any]) -> dict[str, Any]:
    def shown(flag: Flag) -> Any:
        value = values[flag.key]
        if flag.key == "api_key" and value:
            return ["***"] * len(value)
        return list(value) if isinstance(value, tuple) else value

    return nest((flag.path, shown(flag)) for flag in all_flags().values())
