"""config.json as we read it, held to what transformers makes of it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from splitserve.engine.models.config import FAMILIES, ModelConfig, RopeConfig, read_config
from splitserve.engine.models.rope import frequencies_of, longest_context

REQUIRED: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
}
BOOLS = st.booleans()
WINDOWS = st.sampled_from([None, 1, 24, 4096])
LAYER_TYPES = st.lists(
    st.sampled_from(["full_attention", "sliding_attention", "attention"]), min_size=4, max_size=4
)
THETAS = st.sampled_from([10_000, 10_000.0, 500_000.0, 1_000_000, 1e7])
OPTIONAL: dict[str, st.SearchStrategy[Any]] = {
    "vocab_size": st.sampled_from([1, 260, 151_936]),
    "num_key_value_heads": st.sampled_from([None, 4, 8, 64]),
    "head_dim": st.sampled_from([None, 32, 64, 128]),
    "hidden_act": st.sampled_from(["silu", "swish"]),
    "max_position_embeddings": st.sampled_from([512, 40_960]),
    "rms_norm_eps": st.sampled_from([1e-5, 1e-6]),
    "tie_word_embeddings": BOOLS,
    "attention_bias": BOOLS,
    "mlp_bias": BOOLS,
    "sliding_window": WINDOWS,
    "use_sliding_window": BOOLS,
    "max_window_layers": st.sampled_from([0, 1, 3, 4, 28]),
    "layer_types": st.none() | LAYER_TYPES,
    "partial_rotary_factor": st.sampled_from([None, 1.0]),
    "quantization_config": st.none(),
    "torch_dtype": st.just("bfloat16"),
}
# transformers refuses these nulls, in these families alone.
NO_NULL = {("mistral", "num_key_value_heads"), ("qwen3", "head_dim")}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 256},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


@st.composite
def ropes(draw: st.DrawFn, kinds: list[str]) -> dict[str, Any]:
    """The keys about rotary embeddings, in any of the spellings."""
    keys: dict[str, Any] = {"rope_theta": draw(THETAS)} if draw(BOOLS) else {}
    unscaled = ["none", "null"] if "default" in kinds else []
    spelling = draw(st.sampled_from([*unscaled, "rope_scaling", "rope_parameters", "both"]))
    if spelling == "null":
        keys[draw(st.sampled_from(["rope_scaling", "rope_parameters"]))] = None
    if spelling in ("none", "null"):
        return keys
    kind = draw(st.sampled_from(kinds))
    parameters = {draw(st.sampled_from(["type", "rope_type"])): kind, **SCALINGS[kind]}
    if draw(BOOLS):
        parameters["rope_theta"] = draw(THETAS)
    if kind == "default" and draw(BOOLS):
        del parameters[next(iter(parameters))]
    if spelling == "both":
        return keys | {"rope_scaling": parameters, "rope_parameters": {"rope_theta": 7.0}}
    return keys | {spelling: parameters}


@st.composite
def configs(draw: st.DrawFn, kinds: list[str]) -> dict[str, Any]:
    model_type = draw(st.sampled_from(FAMILIES))
    keys = draw(st.fixed_dictionaries({}, optional=OPTIONAL))
    for family, name in NO_NULL:
        if model_type == family and name in keys and keys[name] is None:
            del keys[name]
    return {"model_type": model_type, **REQUIRED, **keys, **draw(ropes(kinds))}


def write(directory: Path, keys: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(keys))
    return directory


def check(keys: dict[str, Any]) -> tuple[ModelConfig, RopeConfig]:
    with tempfile.TemporaryDirectory() as name:
        directory = write(Path(name), keys)
        model, rope = read_config(directory)
        source = AutoConfig.from_pretrained(directory, local_files_only=True)
    assert model == expected_shape(source, keys["model_type"])
    assert rope.theta == source.rope_parameters["rope_theta"]
    assert rope.kind == source.rope_parameters["rope_type"]
    for length in (100, 1024):
        found, factor = frequencies_of(rope, model.head_dim, length)
        expected, expected_factor = expected_frequencies(source, model.head_dim, length)
        assert torch.equal(found, expected)
        assert factor == expected_factor
    return model, rope


def expected_shape(source: Any, model_type: str) -> ModelConfig:
    bias = model_type in ("llama", "qwen3") and source.attention_bias
    return ModelConfig(
        model_type=model_type,
        num_layers=source.num_hidden_layers,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_heads=source.num_attention_heads,
        num_kv_heads=source.num_key_value_heads,
        head_dim=getattr(source, "head_dim", None)
        or source.hidden_size // source.num_attention_heads,
        vocab_size=source.vocab_size,
        norm_eps=source.rms_norm_eps,
        max_positions=source.max_position_embeddings,
        window=expected_window(source),
        qk_norm=model_type == "qwen3",
        qkv_bias=bias or model_type == "qwen2",
        output_bias=bias,
        mlp_bias=model_type == "llama" and source.mlp_bias,
        tied_embeddings=source.tie_word_embeddings,
    )


def expected_window(source: Any) -> int | None:
    layer_types = getattr(source, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    return getattr(source, "sliding_window", None)


def expected_frequencies(source: Any, head_dim: int, length: int) -> tuple[Tensor, float]:
    kind = source.rope_parameters["rope_type"]
    source.head_dim = head_dim  # null in some classes, which dynamic scaling does not compute then
    if kind == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(source)
    return ROPE_INIT_FUNCTIONS[kind](source, torch.device("cpu"), seq_len=length)


FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@FUZZ
@given(configs(["default"]))
def test_an_unscaled_model_is_read_as_transformers_reads_it(keys: dict[str, Any]) -> None:
    model, rope = check(keys)
    event(f"{model.model_type}, {'a' if model.window else 'no'} window")
    assert rope.source is None
    assert longest_context(rope, model.max_positions) == model.max_positions


@FUZZ
@given(configs(sorted(SCALINGS.keys() - {"default"})))
def test_a_scaled_model_is_read_as_transformers_reads_it(keys: dict[str, Any]) -> None:
    model, rope = check(keys)
    event(f"{model.model_type}, {rope.kind}")
    assert rope.source is not None


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_transformers_writes_of_its_defaults_is_read(model_type: str, tmp_path: Path) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    check(json.loads((tmp_path / "config.json").read_text()))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_head_dim_of_null_is_worked_out(model_type: str, tmp_path: Path) -> None:
    keys = {"model_type": model_type, **REQUIRED, "num_key_value_heads": None, "head_dim": None}
    model, _ = read_config(write(tmp_path, keys))
    assert (model.head_dim, model.num_kv_heads) == (32, 64)


@pytest.mark.parametrize(
    ("model_type", "keys"), [("qwen2", {"head_dim": None}), ("mistral", {"layer_types": None})]
)
def test_a_head_dim_of_null_is_worked_out_for_scaling_too(
    model_type: str, keys: dict[str, Any]
) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    model, rope = check({"model_type": model_type, **REQUIRED, **keys, "rope_scaling": scaling})
    assert rope.source is not None
    assert model.head_dim == rope.source.head_dim == 32
