"""What a checkpoint's config.json says, of the families this decoder computes.

It is read here, and not by transformers, because importing that takes as long as the rest of a
worker's start. Only a scaled rotary embedding, which it alone computes, has it imported.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitserve.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

# What a missing key means, as in transformers' class of the family. The four sizes that are not
# here have defaults there too, but those describe one model: without them a file is broken.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "layer_types": None,
    "rope_theta": 10_000.0,
}
_QWEN: dict[str, Any] = {
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
}
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 32_000, "max_position_embeddings": 2048},
    "mistral": {
        "vocab_size": 32_000,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
}
_MOST = 2**31 - 1
_LAYER_TYPES = (
    "full_attention",
    "sliding_attention",
    "attention",
)  # the last: the first's old name


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one decoder. Sizes are in numbers, not bytes."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    max_positions: int  # config.json's max_position_embeddings
    window: int | None  # some layer sees only this many tokens back, itself included
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied_embeddings: bool


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions turn heads: the kind of scaling, the base, and what that kind needs."""

    kind: str
    theta: float
    parameters: Mapping[str, Any]  # as transformers spells them, whatever the file does
    source: PretrainedConfig | None  # what transformers computes from; None for kind "default"


class _Fields:
    """The values of one JSON object. Raises ConfigError with key, value and what is allowed."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def size(self, name: str, least: int = 1) -> int:
        value: Any = self.values.get(name)
        if type(value) is not int or not least <= value <= _MOST:  # True is an int too
            raise self.wrong(name, f"a whole number from {least} to {_MOST}")
        return value

    def size_or_none(self, name: str) -> int | None:
        return None if self.values.get(name) is None else self.size(name)

    def number(self, name: str) -> float:
        value: Any = self.values.get(name)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.wrong(name, "a number above 0")
        try:
            return float(value)
        except OverflowError:
            raise self.wrong(name, "a number that fits into a float") from None

    def flag(self, name: str) -> bool:
        value: Any = self.values.get(name)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def wrong(self, name: str, allowed: str) -> ConfigError:
        found = "is missing; it" if name not in self.values else reprlib.repr(self.values[name])
        return ConfigError(f"{self.path}: {name} {found} must be {allowed}")


def read_config(directory: Path) -> tuple[ModelConfig, RopeConfig]:
    """The shape, and how positions turn heads.

    Raises ConfigError, by name, for a directory without a sound config.json and for what this
    decoder does not compute: another architecture, activation or weight format.
    """
    fields = _read(directory / "config.json")
    _refuse_unsupported(fields)
    model = _shape(fields)
    return model, _rope(fields, model.head_dim)


def _read(path: Path) -> _Fields:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {reprlib.repr(values)}; it must be an object")
    model_type = values.get("model_type")
    if model_type not in FAMILIES:
        shown = reprlib.repr(model_type)
        known = ", ".join(FAMILIES)
        raise ConfigError(f"{path}: model_type {shown} is not supported; there are: {known}")
    return _Fields(path, {**_DEFAULTS, **_FAMILY_DEFAULTS[model_type], **values})


def _refuse_unsupported(fields: _Fields) -> None:
    if fields.values["hidden_act"] not in ("silu", "swish"):
        raise fields.wrong("hidden_act", "silu: no other activation is supported")
    if fields.values.get("quantization_config"):
        raise fields.wrong(
            "quantization_config", "left out: only unquantized weights are supported"
        )
    if fields.values.get("per_layer_config"):
        raise fields.wrong("per_layer_config", "left out: only layers of one shape are supported")


def _shape(fields: _Fields) -> ModelConfig:
    model_type: str = fields.values["model_type"]
    bias = model_type in ("llama", "qwen3") and fields.flag("attention_bias")
    num_heads = fields.size("num_attention_heads")
    return ModelConfig(
        model_type=model_type,
        num_layers=fields.size("num_hidden_layers"),
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, num_heads),
        head_dim=_head_dim(fields, num_heads),
        vocab_size=fields.size("vocab_size"),
        norm_eps=fields.number("rms_norm_eps"),
        max_positions=fields.size("max_position_embeddings"),
        window=_window(fields),
        qk_norm=model_type == "qwen3",
        qkv_bias=bias or model_type == "qwen2",
        output_bias=bias,
        mlp_bias=model_type == "llama" and fields.flag("mlp_bias"),
        tied_embeddings=fields.flag("tie_word_embeddings"),
    )


def _num_kv_heads(fields: _Fields, num_heads: int) -> int:
    num_kv_heads = fields.size_or_none("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        allowed = f"a multiple of num_key_value_heads {num_kv_heads}"
        raise fields.wrong("num_attention_heads", allowed)
    return num_kv_heads


def _head_dim(fields: _Fields, num_heads: int) -> int:
    head_dim = fields.size_or_none("head_dim")
    if head_dim is None:
        hidden_size = fields.size("hidden_size")
        if hidden_size % num_heads:
            raise fields.wrong("hidden_size", f"a multiple of num_attention_heads {num_heads}")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ConfigError(f"{fields.path}: head_dim {head_dim} must be even: halves are rotated")
    return head_dim


def _window(fields: _Fields) -> int | None:
    layer_types = _layer_types(fields)
    qwen = fields.values["model_type"] in ("qwen2", "qwen3")
    if qwen and not fields.flag("use_sliding_window"):
        return None
    if layer_types is not None:
        slides = "sliding_attention" in layer_types
    else:
        num_full = fields.size("max_window_layers", least=0) if qwen else 0
        slides = num_full < fields.size("num_hidden_layers")
    window = fields.size_or_none("sliding_window")
    return window if slides else None


def _layer_types(fields: _Fields) -> list[str] | None:
    layer_types: Any = fields.values["layer_types"]
    if layer_types is None:
        return None
    num_layers = fields.size("num_hidden_layers")
    known = isinstance(layer_types, list) and all(kind in _LAYER_TYPES for kind in layer_types)
    if not known or len(layer_types) != num_layers:
        each = " or ".join(_LAYER_TYPES[:2])
        raise fields.wrong("layer_types", f"a list of {each} for each of {num_layers} layers")
    return list(layer_types)


def _rope(fields: _Fields, head_dim: int) -> RopeConfig:
    parameters = _rope_parameters(fields)
    kind = parameters["rope_type"]
    source = None
    if kind != "default":
        source = _transformers_config(fields.path.parent, head_dim)
        parameters = dict(source.rope_parameters)
    checked = _Fields(fields.path, parameters)
    for name in ("factor", "original_max_position_embeddings"):
        if source is not None and parameters.get(name) is not None:
            checked.number(name)
    if parameters.get("partial_rotary_factor", 1.0) not in (1.0, None):
        raise checked.wrong("partial_rotary_factor", "1: only rotating whole heads is supported")
    return RopeConfig(kind, checked.number("rope_theta"), parameters, source)


def _rope_parameters(fields: _Fields) -> dict[str, Any]:
    """In transformers' present spelling: its older ones are rope_scaling, type, rope_theta."""
    name = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    written = fields.values.get(name) or {}
    if not isinstance(written, dict):
        raise fields.wrong(name, "an object or null")
    if any(isinstance(value, dict) for value in written.values()):
        raise fields.wrong(name, "one for all layers: none by layer type is supported")
    parameters = {"rope_theta": fields.values["rope_theta"], **written}
    if fields.values.get("partial_rotary_factor") is not None:
        parameters.setdefault("partial_rotary_factor", fields.values["partial_rotary_factor"])
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    if not isinstance(parameters["rope_type"], str):
        raise fields.wrong(name, "an object whose rope_type is a string")
    return parameters


def _transformers_config(directory: Path, head_dim: int) -> Any:
    from transformers import AutoConfig  # over a second, which an unscaled model need not pay

    try:
        # A head_dim of null stays one in some of its classes, whose scaling then can't be computed.
        return AutoConfig.from_pretrained(directory, local_files_only=True, head_dim=head_dim)
    except Exception as error:  # its validators raise a dozen classes, some of other packages
        raise ConfigError(f"{directory / 'config.json'}: {error}") from error
