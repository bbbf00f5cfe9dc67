"""What a checkpoint's config.json says, of the families this decoder computes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from splitserve.errors import ConfigError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


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


def read_config(directory: Path) -> tuple[ModelConfig, PretrainedConfig]:
    """The shape, and transformers' config for what it alone knows (rope scaling).

    Raises ConfigError, by name, for a directory without config.json and for what this decoder
    does not compute: another architecture, activation or weight format.
    """
    model_type = _model_type(directory)
    if model_type not in FAMILIES:
        raise ConfigError(
            f"model_type {model_type!r} is not supported; there are: {', '.join(FAMILIES)}"
        )
    try:
        source = AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # its validators raise a dozen classes, some of other packages
        raise ConfigError(f"{directory / 'config.json'}: {error}") from error
    _refuse_unsupported(source)
    return _shape(source), source


def _model_type(directory: Path) -> Any:
    """Looked at before transformers does, whose message for a new family is to upgrade."""
    path = directory / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _refuse_unsupported(source: Any) -> None:
    if source.hidden_act not in ("silu", "swish"):
        raise ConfigError(f"hidden_act {source.hidden_act!r} is not supported; only silu is")
    if getattr(source, "quantization_config", None):
        raise ConfigError("quantization_config is not supported: only unquantized weights are")
    if source.num_attention_heads % _num_kv_heads(source):
        raise ConfigError(
            f"num_attention_heads {source.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {source.num_key_value_heads}"
        )


def _shape(source: Any) -> ModelConfig:
    model_type = source.model_type
    bias = bool(getattr(source, "attention_bias", False)) and model_type in ("llama", "qwen3")
    return ModelConfig(
        model_type=model_type,
        num_layers=source.num_hidden_layers,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_heads=source.num_attention_heads,
        num_kv_heads=_num_kv_heads(source),
        head_dim=getattr(source, "head_dim", None)
        or source.hidden_size // source.num_attention_heads,
        vocab_size=source.vocab_size,
        norm_eps=source.rms_norm_eps,
        max_positions=source.max_position_embeddings,
        window=_window(source),
        qk_norm=model_type == "qwen3",
        qkv_bias=bias or model_type == "qwen2",
        output_bias=bias,
        mlp_bias=model_type == "llama" and bool(getattr(source, "mlp_bias", False)),
        tied_embeddings=bool(source.tie_word_embeddings),
    )


def _num_kv_heads(source: Any) -> int:
    return int(source.num_key_value_heads or source.num_attention_heads)


def _window(source: Any) -> int | None:
    layer_types = getattr(source, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    return getattr(source, "sliding_window", None)
