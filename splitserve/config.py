"""What each process is told when it starts. Frozen; a changed config is a new object.

The launcher resolves flags, environment and files once (settings.py) and hands every role its own
config as JSON in the environment variable SPLITSERVE_ROLE_CONFIG, so keys stay off command lines.
"""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from splitserve.errors import ConfigError

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")
MAX_WORKERS = 1024  # of one pool
ROLE_CONFIG_ENV = "SPLITSERVE_ROLE_CONFIG"
READY_FD_ENV = "SPLITSERVE_READY_FD"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one worker computes. `model` is a local Hugging Face directory by now."""

    model: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int | None = None  # None: the model's
    block_size: int = 16  # tokens in a KV block
    kv_cache_memory_bytes: int | None = None  # None on CPU: min(1 GiB, 10 % of free memory)
    num_blocks: int | None = None  # overrides kv_cache_memory_bytes
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None  # None: 512 on CPU, 8192 on GPU
    num_threads: int | None = None  # None: as many as cores given
    enable_prefix_caching: bool = False
    attention_backend: Literal["auto", "reference", "cpu", "triton"] = "auto"
    quantization: Literal["none", "int8"] = "none"  # of weights
    kv_cache_dtype: Literal["auto", "int8"] = "auto"  # auto: dtype


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of one token's keys and values, which both ends of a transfer must share.

    A token is `num_layers x 2 (K, V) x num_kv_heads` heads of `head_dim` numbers of `dtype`; a head
    in int8 is followed by the f32 that its numbers are to be multiplied by.
    """

    dtype: str  # "float32", "bfloat16", "float16", "int8"
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def bytes_per_number(self) -> int:
        return {"float32": 4, "int8": 1}.get(self.dtype, 2)

    @property
    def head_bytes(self) -> int:
        """Of one key or value."""
        scale_bytes = 4 if self.dtype == "int8" else 0
        return self.head_dim * self.bytes_per_number + scale_bytes

    @property
    def token_bytes_per_layer(self) -> int:
        return 2 * self.num_kv_heads * self.head_bytes

    @property
    def token_bytes(self) -> int:
        return self.num_layers * self.token_bytes_per_layer


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Hashes of what makes two workers the same model. Equal on every worker of a cluster."""

    weights: str
    config: str
    tokenizer: str


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """CurveZMQ keys of one cluster (Z85 text). Everyone is a client or a server with these."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str


@dataclass(frozen=True, slots=True)
class Liveness:
    """Intervals of the liveness protocol, seconds."""

    heartbeat_interval_s: float = 0.5
    heartbeat_timeout_s: float = 3.0
    stall_timeout_s: float = 10.0  # a granted transfer with no write for this long is dead
    max_step_s: float = 60.0  # a worker whose loop turns no more for longer is wedged


@dataclass(frozen=True, slots=True)
class Promises:
    """What every worker of a cluster can serve by itself. Numbers of tokens unless said."""

    max_prompt_tokens: int  # of the smallest prefill worker
    max_total_tokens: int  # prompt and answer, of the smallest decode worker and the model
    max_choices: int  # choices of one prompt
    num_decode_blocks: int  # blocks
    block_size: int  # tokens in a block


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What `python -m prefill_worker` or `python -m decode_worker` is told."""

    role: Role
    engine: EngineConfig
    control_endpoint: str  # the coordinator's ROUTER, tcp://host:port
    launch_id: str  # which Start made this process; comes back in Hello and ProcessExited
    bind_host: str = "127.0.0.1"  # where the data socket binds (port 0)
    device: str = "cpu"  # "cpu" or "cuda:N"
    cores: tuple[int, ...] | None = None  # pin to these CPUs; None: unpinned
    transport: Literal["auto", "tcp", "shm", "collective", "nixl"] = "tcp"
    liveness: Liveness = field(default_factory=Liveness)
    keys: CurveKeys | None = None  # None: plain sockets, loopback only
    cluster_token: str = ""  # goes into Hello
    drain_grace_s: float = 30.0  # how long a worker that leaves may keep its streams
    parent_pid: int | None = None  # exit when this process is gone
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """What `python -m coordinator` is told."""

    model: str  # local Hugging Face directory (config and tokenizer are read from it)
    model_name: str  # as the user named it
    served_model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000  # 0: the kernel picks; reported in the Ready message
    api_keys: tuple[str, ...] = ()
    control_host: str = "127.0.0.1"  # where the control ROUTER binds
    control_port: int = 0  # 0: the kernel picks
    advertise_host: str | None = None  # what peers connect to; None: control_host
    num_prefill: int = 1  # targets
    num_decode: int = 1
    router: Literal["round_robin", "least_loaded"] = "least_loaded"
    max_queue: int = 256
    request_timeout_s: float = 600.0
    generation_config: Literal["auto", "vllm"] = "auto"
    liveness: Liveness = field(default_factory=Liveness)
    keys: CurveKeys | None = None
    cluster_token: str = ""  # whoever says Hello must know it; empty: anybody may
    successor: bool = False  # it replaces one that died: workers of that one will say Hello
    promises: Promises | None = None  # of the one that died
    previous_end: str = ""  # how that was
    start_timeout_s: float = 600.0  # for a worker to be ready
    max_restarts: int = 5  # of one worker, in 5 minutes
    drain_grace_s: float = 30.0  # how long a worker that leaves may keep its streams
    parent_pid: int | None = None
    log_level: str = "info"


def user_cache_dir() -> Path:
    """Where what is made once for a user is kept: splitserve under XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "splitserve"


def to_json(config: WorkerConfig | CoordinatorConfig) -> str:
    return json.dumps(dataclasses.asdict(config))


def from_json(kind: type[T], text: str) -> T:
    """The inverse of `to_json`. Raises ConfigError naming an unknown or missing key."""
    try:
        return typing.cast(T, _build(kind, json.loads(text)))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{kind.__name__}: {error}") from error


def _build(kind: Any, value: Any) -> Any:
    """`value` (parsed JSON) as an instance of the annotated type `kind`."""
    origin = get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        inner = next(arg for arg in get_args(kind) if arg is not type(None))
        return None if value is None else _build(inner, value)
    if origin is tuple:
        return tuple(_build(get_args(kind)[0], item) for item in value)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        hints = get_type_hints(kind)
        unknown = set(value) - set(hints)
        if unknown:
            raise ValueError(f"unknown key {min(unknown)!r}")
        return typing.cast(Any, kind)(**{k: _build(hints[k], v) for k, v in value.items()})
    return value
