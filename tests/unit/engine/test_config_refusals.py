"""What a config.json is refused for: always a ConfigError that names it."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from splitserve.engine.models.config import FAMILIES, read_config
from splitserve.engine.models.rope import frequencies_of, longest_context
from splitserve.errors import ConfigError

REQUIRED: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
}
SIZES = [*REQUIRED, "vocab_size", "max_position_embeddings", "num_key_value_heads", "head_dim"]
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 2.0}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 2.0}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "factor": 2.0,
    "short_factor": [1.0] * 32,
    "long_factor": [2.0] * 32,
}


def write(directory: Path, keys: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(keys))
    return directory


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("name", REQUIRED)
def test_a_size_that_is_missing_is_named(model_type: str, name: str, tmp_path: Path) -> None:
    keys = {"model_type": model_type, **REQUIRED, "num_key_value_heads": 4}
    del keys[name]
    with pytest.raises(ConfigError, match=rf"config\.json: {name} is missing.*whole number from 1"):
        read_config(write(tmp_path, keys))


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, 64.0, "64", True, [64], 10**30])
def test_a_size_that_is_none_is_named(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: {name} .* whole number from 1"):
        read_config(write(tmp_path, {"model_type": "llama", **REQUIRED, name: value}))


@pytest.mark.parametrize(
    ("model_type", "keys", "message"),
    [
        ("gpt2", {}, "model_type 'gpt2' is not supported.*llama, mistral, qwen2, qwen3"),
        (None, {}, "model_type None"),
        (["llama"], {}, r"model_type \['llama'\]"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' must be silu"),
        ("llama", {"hidden_act": None}, "hidden_act None must be silu"),
        ("llama", {"quantization_config": {"bits": 4}}, r"quantization_config \{'bits': 4\}"),
        ("llama", {"per_layer_config": {"0": {"hidden_size": 8}}}, "per_layer_config"),
        ("llama", {"vocab_size": None}, "vocab_size None must be a whole number"),
        ("llama", {"num_key_value_heads": 5}, "num_attention_heads 32.*num_key_value_heads 5"),
        ("llama", {"hidden_size": 2049}, "hidden_size 2049.*num_attention_heads 32"),
        ("llama", {"head_dim": 33}, "head_dim 33 must be even"),
        ("qwen2", {"hidden_size": 96}, "head_dim 3 must be even"),
        ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps '1e-5' must be a number above 0"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps None"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps nan"),
        ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps inf"),
        ("llama", {"rms_norm_eps": True}, "rms_norm_eps True"),
        ("llama", {"attention_bias": 1}, "attention_bias 1 must be true or false"),
        ("llama", {"mlp_bias": None}, "mlp_bias None must be true or false"),
        ("qwen3", {"attention_bias": "no"}, "attention_bias 'no'"),
        ("qwen2", {"tie_word_embeddings": None}, "tie_word_embeddings None"),
        ("mistral", {"sliding_window": 0}, "sliding_window 0 must be a whole number from 1"),
        ("qwen2", {"use_sliding_window": None}, "use_sliding_window None"),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers -1"),
        ("mistral", {"layer_types": ["full_attention"]}, "layer_types.*each of 4 layers"),
        ("mistral", {"layer_types": "full_attention"}, "layer_types 'full_attention'"),
        ("mistral", {"layer_types": ["full_attention", "conv"] * 2}, "layer_types.*'conv'"),
        ("qwen3", {"layer_types": ["linear_attention"] * 4}, "layer_types.*'linear_attention'"),
        ("llama", {"rope_theta": None}, "rope_theta None must be a number above 0"),
        ("llama", {"rope_theta": 0}, "rope_theta 0 must"),
        ("llama", {"rope_theta": "many"}, "rope_theta 'many'"),
        ("llama", {"rope_theta": 10**400}, "rope_theta 1000.* fits into a float"),
        ("llama", {"rope_parameters": {"rope_theta": -1.0}}, "rope_theta -1.0"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling 'linear' must be an object or null"),
        ("llama", {"rope_parameters": [1]}, r"rope_parameters \[1\]"),
        ("llama", {"rope_parameters": {"rope_type": None}}, ".*rope_type is a string"),
        ("qwen3", {"rope_parameters": {"full_attention": {}}}, "rope_parameters.*by layer type"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 must be 1"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ("llama", {"rope_scaling": LINEAR, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"rope_scaling": {"type": "linear"}}, ".*linear.*factor"),
        ("llama", {"rope_scaling": {**LINEAR, "factor": "two"}}, "factor 'two' must be a number"),
        ("llama", {"rope_scaling": {**LINEAR, "factor": 0}}, "factor 0 must be a number above 0"),
        ("llama", {"rope_scaling": LINEAR, "rope_theta": 0}, "rope_theta 0 must"),
    ],
)
def test_what_can_not_be_is_refused_by_name(
    model_type: Any, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: {message}"):
        read_config(write(tmp_path, {"model_type": model_type, **REQUIRED, **keys}))


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "spiral"}, "kind 'spiral' is not supported; there are: default, dynamic"),
        ({**LLAMA3, "low_freq_factor": 0}, "kind 'llama3'"),
        ({**LONGROPE, "short_factor": [1.0] * 5}, "kind 'longrope'"),
        ({**YARN, "attention_factor": "x"}, "kind 'yarn'.*'x'"),
    ],
)
def test_a_scaling_that_can_not_be_computed_is_refused(
    scaling: dict[str, Any], message: str, tmp_path: Path
) -> None:
    keys = {"model_type": "llama", **REQUIRED, "rope_scaling": scaling}
    model, rope = read_config(write(tmp_path, keys))
    with pytest.raises(ConfigError, match=message):
        frequencies_of(rope, model.head_dim, 512)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"{'model_type': 'llama'}", "Expecting property name"),
        (b'["llama"]', r"\['llama'\]; it must be an object"),
        (b"null", "None; it must be an object"),
        (b'{"model_type": "ll\xe4ma"}', "utf-8"),
        (b"[" * 100_000, "recursion"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "digits"),
    ],
)
def test_a_file_that_is_no_json_object_is_named(
    content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"config\.json.*{message}"):
        read_config(tmp_path)


def test_a_file_that_is_not_there_or_is_a_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json.*No such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json.*Is a directory"):
        read_config(tmp_path)


def test_a_factor_may_stretch_further_than_a_float_goes(tmp_path: Path) -> None:
    scaling = {**LINEAR, "factor": 1e308}
    model, rope = read_config(
        write(tmp_path, {"model_type": "llama", **REQUIRED, "rope_scaling": scaling})
    )
    assert longest_context(rope, model.max_positions) == sys.maxsize


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
KEYS = [*SIZES, "hidden_act", "rms_norm_eps", "tie_word_embeddings", "attention_bias", "mlp_bias"]
KEYS += ["sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "rope_theta"]
KEYS += ["quantization_config", "per_layer_config", "rope_scaling", "rope_parameters"]


@FUZZ
@given(st.sampled_from(FAMILIES), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3))
def test_nonsense_is_read_or_refused(model_type: str, keys: dict[str, Any]) -> None:
    survive({"model_type": model_type, **REQUIRED, **keys})


@FUZZ
@given(st.sampled_from([LINEAR, YARN, LLAMA3, LONGROPE]), st.data())
def test_nonsense_in_a_scaling_is_read_or_refused(scaling: dict[str, Any], data: Any) -> None:
    names = [*scaling, "rope_theta", "original_max_position_embeddings", "attention_factor"]
    names += ["beta_fast", "mscale", "mscale_all_dim", "truncate", "partial_rotary_factor"]
    nonsense = data.draw(st.dictionaries(st.sampled_from(names), JSON, max_size=2))
    survive({"model_type": "llama", **REQUIRED, "rope_scaling": scaling | nonsense})


def survive(keys: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as name, contextlib.suppress(ConfigError):
        model, rope = read_config(write(Path(name), keys))
        assert longest_context(rope, model.max_positions) >= model.max_positions
        if model.head_dim < 1000:
            frequencies_of(rope, model.head_dim, 512)
