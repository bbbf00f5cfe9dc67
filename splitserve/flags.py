"""The table of everything `serve` and `up` can be told: one row a setting, each default once.

A row is a flag (`--max-num-seqs`), an environment variable (SPLITSERVE_MAX_NUM_SEQS) and a key of
the YAML file (`engine: {max_num_seqs: ...}`). An engine row also exists for each pool
(`--prefill-max-num-seqs`, `prefill: {max_num_seqs: ...}`). Of two values said in the same place, a
pool's own wins over the shared one; a flag wins over a variable, and that over the file.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

from splitserve.config import (
    MAX_WORKERS,
    CoordinatorConfig,
    EngineConfig,
    Liveness,
    Role,
    WorkerConfig,
)

Kind = Literal["int", "float", "bytes", "str", "bool", "strs", "devices", "map"]


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting. `default` None means unset: the help says what happens then."""

    key: str  # unique; the flag and the environment variable are made from it
    kind: Kind
    help: str
    path: tuple[str, ...]  # where it is in the YAML file
    default: Any = None
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    file_only: bool = False

    @property
    def option(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        return "SPLITSERVE_" + self.key.upper()


def default_of(config: type[Any], name: str) -> Any:
    """The default of a dataclass field, so that it is written in one place."""
    (field,) = (item for item in dataclasses.fields(config) if item.name == name)
    return None if field.default is dataclasses.MISSING else field.default


def _choices_of(config: type[Any], name: str) -> tuple[str, ...]:
    return tuple(str(value) for value in get_args(get_type_hints(config)[name]))


def _top(key: str, kind: Kind, help: str, default: Any = None, **limits: Any) -> Flag:
    return Flag(key, kind, help, (key,), default, **limits)


def _engine(key: str, kind: Kind, help: str, **limits: Any) -> Flag:
    default = default_of(EngineConfig, key)
    return Flag(key, kind, help, ("engine", key), default, **limits)


_SERVING = (
    _top("model", "str", "A Hugging Face directory or hub id, a .gguf file, or an alias."),
    Flag(
        "prefill",
        "int",
        "Number of prefill workers; 0: the decode workers prefill for themselves.",
        ("prefill", "num_workers"),
        default_of(CoordinatorConfig, "num_prefill"),
        low=0,
        high=MAX_WORKERS,
    ),
    Flag(
        "decode",
        "int",
        "Number of decode workers.",
        ("decode", "num_workers"),
        default_of(CoordinatorConfig, "num_decode"),
        low=1,
        high=MAX_WORKERS,
    ),
    _top("host", "str", "Where HTTP listens.", default_of(CoordinatorConfig, "host")),
    _top(
        "port",
        "int",
        "The HTTP port; 0: any free one.",
        default_of(CoordinatorConfig, "port"),
        low=0,
        high=65535,
    ),
    _top("served_model_name", "strs", "A name clients may use (repeatable). Unset: the model's."),
    _top("api_key", "strs", "A key clients must send (repeatable). Unset: none is asked for."),
)
_ENGINE = (
    _engine("dtype", "str", "Type of weights and KV.", choices=_choices_of(EngineConfig, "dtype")),
    _engine("max_model_len", "int", "Longest prompt + answer. Unset: the model's.", low=1),
    _engine("block_size", "int", "Tokens in a KV block.", low=1, high=1024),
    _engine(
        "kv_cache_memory_bytes",
        "bytes",
        "KV memory of a worker, e.g. 512MiB. Unset on CPU: min(1 GiB, 10 % of free memory).",
        low=1,
    ),
    _engine("num_blocks", "int", "KV blocks of a worker; overrides the above.", low=1),
    _engine(
        "gpu_memory_utilization",
        "float",
        "Part of a GPU's memory to use, divided among the workers that share it.",
        low=0.01,
        high=1.0,
    ),
    _engine("max_num_seqs", "int", "Most sequences in a step.", low=1, high=65536),
    _engine(
        "max_num_batched_tokens",
        "int",
        "Most tokens in a step. Unset: 512 on CPU, 8192 on GPU.",
        low=1,
    ),
    _engine("num_threads", "int", "Threads of a worker. Unset: cores / workers.", low=1, high=4096),
    _engine("enable_prefix_caching", "bool", "Keep KV for prompts that begin alike."),
    _engine(
        "attention_backend",
        "str",
        "Which attention code runs.",
        choices=_choices_of(EngineConfig, "attention_backend"),
    ),
    _engine(
        "quantization",
        "str",
        "int8: weights in half the bytes of bfloat16, rounded (CPU).",
        choices=_choices_of(EngineConfig, "quantization"),
    ),
    _engine(
        "kv_cache_dtype",
        "str",
        "Type of KV, here and on the wire. auto: that of weights; int8: about half of bfloat16.",
        choices=_choices_of(EngineConfig, "kv_cache_dtype"),
    ),
)
_CLUSTER = (
    _top(
        "transport",
        "str",
        "How KV travels.",
        default_of(WorkerConfig, "transport"),
        choices=_choices_of(WorkerConfig, "transport"),
    ),
    _top(
        "heartbeat_interval_s",
        "float",
        "Seconds between heartbeats.",
        default_of(Liveness, "heartbeat_interval_s"),
        low=0.01,
        high=60,
    ),
    _top(
        "heartbeat_timeout_s",
        "float",
        "Silence after which a worker counts as dead, in seconds.",
        default_of(Liveness, "heartbeat_timeout_s"),
        low=0.05,
        high=3600,
    ),
    _top(
        "stall_timeout_s",
        "float",
        "A granted transfer without a write for this long is dead.",
        default_of(Liveness, "stall_timeout_s"),
        low=0.1,
        high=3600,
    ),
    _top(
        "max_step_s",
        "float",
        "A worker stuck in one step for longer is killed as wedged, in seconds.",
        default_of(Liveness, "max_step_s"),
        low=0.1,
        high=86400,
    ),
    _top(
        "max_restarts",
        "int",
        "Restarts of one worker, or of the coordinator, in 5 minutes before it is given up.",
        default_of(CoordinatorConfig, "max_restarts"),
        low=0,
        high=1000,
    ),
    _top(
        "drain_grace_s",
        "float",
        "How long a worker that leaves may keep its streams before they are moved, in seconds.",
        default_of(CoordinatorConfig, "drain_grace_s"),
        low=0,
        high=86400,
    ),
    _top(
        "request_timeout_s",
        "float",
        "Deadline of a request, in seconds.",
        default_of(CoordinatorConfig, "request_timeout_s"),
        low=0.1,
        high=86400,
    ),
    _top(
        "max_queue",
        "int",
        "Most requests that wait; more are answered 429.",
        default_of(CoordinatorConfig, "max_queue"),
        low=1,
        high=1_000_000,
    ),
    _top(
        "router",
        "str",
        "How workers are picked.",
        default_of(CoordinatorConfig, "router"),
        choices=_choices_of(CoordinatorConfig, "router"),
    ),
    _top(
        "generation_config",
        "str",
        "auto: the model's generation_config.json gives sampling defaults; vllm: it is ignored.",
        default_of(CoordinatorConfig, "generation_config"),
        choices=_choices_of(CoordinatorConfig, "generation_config"),
    ),
    _top(
        "log_level",
        "str",
        "Least severe line that is logged.",
        default_of(CoordinatorConfig, "log_level"),
        choices=("debug", "info", "warning", "error"),
    ),
    _top("start_timeout_s", "float", "All must be ready within this.", 600.0, low=1, high=86400),
    _top("stop_grace_s", "float", "From SIGTERM to SIGKILL.", 10.0, low=0, high=3600),
)
_RAY = (
    Flag("ray_address", "str", "Ray cluster: auto, local, host:port.", ("ray", "address"), "auto"),
    Flag("ray_namespace", "str", "Ray namespace.", ("ray", "namespace"), "splitserve"),
    Flag("ray_name", "str", "Name of this cluster on Ray.", ("ray", "name"), "default"),
    Flag(
        "ray_placement_timeout_s",
        "float",
        "How long Ray may take to find room.",
        ("ray", "placement_timeout_s"),
        120.0,
        low=1,
        high=86400,
    ),
)


_PLACEMENT = (
    _top("model", "str", "Must be the cluster's.", file_only=True),
    _top("num_cpus", "float", "CPUs that Ray sets aside.", 1.0, low=0, file_only=True),
    _top("num_gpus", "float", "GPUs that Ray sets aside.", 0.0, low=0, file_only=True),
    _top("resources", "map", "Custom Ray resources.", file_only=True),
    _top("label_selector", "map", "Labels of the Ray node.", file_only=True),
    _top("accelerator_type", "str", "Ray's name of the GPU type.", file_only=True),
)


def _pool(role: Role) -> tuple[Flag, ...]:
    own = tuple(
        dataclasses.replace(
            flag,
            key=f"{role}_{flag.key}",
            path=(role, flag.key),
            default=None,
            help=f"{flag.option} for {role} workers only.",
        )
        for flag in _ENGINE
    )
    devices = Flag(
        f"{role}_devices", "devices", f"GPUs of the {role} workers: 0 or 1,2.", (role, "devices")
    )
    rows = (
        dataclasses.replace(row, key=f"{role}_{row.key}", path=(role, row.key))
        for row in _PLACEMENT
    )
    return (*own, devices, *rows)


ENGINE_KEYS = tuple(flag.key for flag in _ENGINE)


@cache
def all_flags() -> dict[str, Flag]:
    """Every row by key, in the order in which `--help` shows them."""
    rows = (*_SERVING, *_ENGINE, *_CLUSTER, *_pool("prefill"), *_pool("decode"), *_RAY)
    assert len({flag.key for flag in rows}) == len(rows)
    return {flag.key: flag for flag in rows}
