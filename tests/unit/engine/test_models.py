"""Every family and every kind of rope scaling, held to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from splitserve.errors import ConfigError
from tests.tiny_models import make_tiny_model
from tests.unit.engine.conftest import LoadRunner, expected_logits
from tests.unit.engine.sequences import Prompts, chunk

NUM_BLOCKS = 96
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, biased": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama, a KV head for each query head": ("llama", {"num_key_value_heads": 4}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"head_dim": 16}),
    "qwen2 tied": ("qwen2", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3 biased": ("qwen3", {"attention_bias": True}),
}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10_000.0, **parameters}


ROPES: dict[str, tuple[dict[str, Any], int]] = {  # parameters, max_model_len
    "default": (rope("default"), 512),
    "linear": (rope("linear", factor=4.0), 512),
    "dynamic": (rope("dynamic", factor=4.0), 512),
    "yarn": (rope("yarn", factor=4.0, original_max_position_embeddings=128), 512),
    "llama3": (
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
        512,
    ),
    "longrope": (
        rope(
            "longrope",
            factor=4.0,
            original_max_position_embeddings=64,
            short_factor=[1.0 + 0.1 * i for i in range(16)],
            long_factor=[2.0 + 0.5 * i for i in range(16)],
        ),
        512,
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_equals_transformers(name: str, tmp_path: Path, load: LoadRunner) -> None:
    model_type, keys = FAMILIES[name]
    check(make_tiny_model(model_type, tmp_path, **keys), load, max_model_len=None)


@pytest.mark.parametrize("name", ROPES)
def test_rope_scaling_equals_transformers(name: str, tmp_path: Path, load: LoadRunner) -> None:
    parameters, max_model_len = ROPES[name]
    check(make_tiny_model("llama", tmp_path, rope_parameters=parameters), load, max_model_len)


def check(directory: Path, load: LoadRunner, max_model_len: int | None) -> None:
    runner = load(directory, max_model_len=max_model_len)
    prompts = Prompts(NUM_BLOCKS)
    token_ids, blocks = prompts.token_ids(150), prompts.blocks(150)
    found = [
        runner.logits([chunk(token_ids, start, end, blocks)])[0]
        for start, end in ((0, 100), (100, 148), (148, 149), (149, 150))
    ]
    expected = expected_logits(directory, token_ids)
    # longrope: transformers turns a prompt by its own length, which ends in the long half here.
    torch.testing.assert_close(torch.stack(found), expected[[99, 147, 148, 149]], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("parameters", "limit"),
    [
        (rope("default"), 512),
        (rope("dynamic", factor=4.0), 512),
        (rope("linear", factor=4.0), 2048),
        (rope("yarn", factor=4.0, original_max_position_embeddings=512), 2048),
        (rope("yarn", factor=4.0, original_max_position_embeddings=128), 512),
        (rope("yarn", factor=2.0, original_max_position_embeddings=128), 512),
    ],
)
def test_scaling_says_how_long_a_context_may_be(
    parameters: dict[str, Any], limit: int, tmp_path: Path, load: LoadRunner
) -> None:
    directory = make_tiny_model("llama", tmp_path, rope_parameters=parameters)
    assert load(directory).max_model_len == 512
    assert load(directory, max_model_len=limit).max_model_len == limit
    with pytest.raises(ConfigError, match=f"max_model_len {limit + 1}.*{limit}"):
        load(directory, max_model_len=limit + 1)


def test_many_files_and_bfloat16_weights(tmp_path: Path, load: LoadRunner) -> None:
    directory = make_tiny_model("llama", tmp_path, shard_size="60KB", dtype=torch.bfloat16)
    assert len(list(directory.glob("*.safetensors"))) > 2
    check(directory, load, max_model_len=None)


def test_bfloat16_is_near(tmp_path: Path, load: LoadRunner) -> None:
    directory = make_tiny_model("llama", tmp_path)
    runner = load(directory, dtype="bfloat16")
    prompts = Prompts(NUM_BLOCKS)
    token_ids, blocks = prompts.token_ids(60), prompts.blocks(60)
    found = runner.logits([chunk(token_ids, 0, 60, blocks)])[0].float()
    expected = expected_logits(directory, token_ids)[-1]
    assert runner.layout.dtype == "bfloat16"
    assert (found - expected).abs().max() < 0.05 * (expected.max() - expected.min())


# -- refused by name ---------------------------------------------------------------------------


def edit_config(directory: Path, **changes: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3_text"}, "'gemma3_text'.*llama, mistral, qwen2, qwen3"),
        ({"model_type": "new_and_shiny"}, "'new_and_shiny'"),
        ({"rope_parameters": rope("spiral", factor=2.0)}, "kind 'spiral'"),
        ({"rope_parameters": rope("linear")}, "linear.*factor"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4.*num_key_value_heads 3"),
        ({"vocab_size": 300}, r"embed_tokens.*\(260, 64\).*\(300, 64\)"),
        ({"num_hidden_layers": 3}, r"no tensor 'model\.layers\.2\."),
        ({"max_position_embeddings": "many"}, r"config\.json: max_position_embeddings 'many'"),
    ],
)
def test_a_config_is_refused_by_name(
    tiny_llama: Path, tmp_path: Path, load: LoadRunner, changes: dict[str, Any], message: str
) -> None:
    for path in tiny_llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ConfigError, match=message):
        load(edit_config(tmp_path, **changes))


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("mistral", {"sliding_window": 24}),
        ("qwen3", {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 1}),
    ],
)
def test_a_sliding_window_is_refused_where_it_bites(
    model_type: str, keys: dict[str, Any], tmp_path: Path, load: LoadRunner
) -> None:
    directory = make_tiny_model(model_type, tmp_path, **keys)
    with pytest.raises(ConfigError, match="sliding_window 24"):
        load(directory)
    with pytest.raises(ConfigError, match="sliding_window 24"):
        load(directory, max_model_len=25)
    runner = load(directory, max_model_len=24)
    prompts = Prompts(NUM_BLOCKS)
    token_ids, blocks = prompts.token_ids(24), prompts.blocks(24)
    found = runner.logits([chunk(token_ids, 0, 24, blocks)])[0]
    expected = expected_logits(directory, token_ids)[-1]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_a_window_that_is_switched_off_is_no_window(tmp_path: Path, load: LoadRunner) -> None:
    keys: dict[str, Any] = {"sliding_window": 24, "use_sliding_window": False}
    check(make_tiny_model("qwen3", tmp_path, **keys), load, max_model_len=None)


def test_a_directory_without_weights(tiny_llama: Path, tmp_path: Path, load: LoadRunner) -> None:
    (tmp_path / "config.json").write_bytes((tiny_llama / "config.json").read_bytes())
    with pytest.raises(ConfigError, match="no safetensors"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load(tmp_path / "nowhere")
