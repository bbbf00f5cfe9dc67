"""A GGUF becomes the checkpoint it was made from: whole, once, by whoever comes first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from splitserve import gguf_conversion
from splitserve.errors import ConfigError
from splitserve.gguf_conversion import convert, model_config, unpermuted
from splitserve.models import cache_dir, resolve_model
from tests.tiny_models import CHAT_TEMPLATE, make_tiny_model
from tests.unit.gguf_files import permuted, write_gguf


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("checkpoint") / "llama")


@pytest.fixture
def gguf_file(checkpoint: Path, tmp_path: Path) -> Path:
    return write_gguf(checkpoint, tmp_path / "tiny.gguf", "llama", CHAT_TEMPLATE)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_dir()


def assert_same_weights(ours: Path, original: Path) -> None:
    got: dict[str, Any] = {}
    for path in ours.glob("*.safetensors"):
        got |= load_file(path)
    want = load_file(original / "model.safetensors")
    assert set(got) == set(want)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


# -- whole models -------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_model_comes_back_as_it_was(arch: str, tmp_path: Path) -> None:
    original = make_tiny_model(arch, tmp_path / "original")
    converted = tmp_path / "converted"
    convert(write_gguf(original, tmp_path / "x.gguf", arch, CHAT_TEMPLATE), converted)
    assert_same_weights(converted, original)
    ids = torch.arange(40)[None] * 5
    with torch.inference_mode():
        ours, theirs = (
            AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (converted, original)
        )
    assert torch.equal(ours, theirs)


def test_tied_embeddings_and_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = make_tiny_model("llama", tmp_path / "original", tie_word_embeddings=True)
    monkeypatch.setattr(gguf_conversion, "SHARD_BYTES", 100_000)
    convert(write_gguf(original, tmp_path / "x.gguf", "llama"), tmp_path / "converted")
    assert len(list((tmp_path / "converted").glob("*.safetensors"))) > 2
    assert_same_weights(tmp_path / "converted", original)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "converted").config.tie_word_embeddings


# -- interruptions ------------------------------------------------------------------------------


def test_concurrent_starts_convert_once(gguf_file: Path, cache: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "model"
    inodes = []

    def run(_: int) -> None:
        convert(gguf_file, target)
        inodes.append(target.stat().st_ino)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    assert len(inodes) == 4 and len(set(inodes)) == 1
    assert sorted(path.name for path in target.parent.iterdir()) == ["model", "model.lock"]


def test_a_killed_conversion_leaves_nothing_that_looks_whole(
    gguf_file: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out" / "model"
    # Its first file is written before torch is loaded, its last long after.
    command = [sys.executable, "-m", "splitserve.gguf_conversion", str(gguf_file), str(target)]
    with subprocess.Popen([*command, str(os.getpid())]) as child:
        config = target.with_name("model.partial") / "config.json"
        wait_for_file(config, child)
        child.send_signal(signal.SIGKILL)
    assert not target.exists()
    convert(gguf_file, target)
    assert (target / "model.safetensors").is_file()
    assert not target.with_name("model.partial").exists()


def wait_for_file(path: Path, writer: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if path.exists():
            return
        with pytest.raises(subprocess.TimeoutExpired):  # it must not end by itself
            writer.wait(0.05)
    raise AssertionError(f"{path} did not appear within 30 s")


# -- refusals -----------------------------------------------------------------------------------


def test_an_architecture_that_is_not_supported_is_named(
    checkpoint: Path, tmp_path: Path, cache: Path
) -> None:
    file = write_gguf(checkpoint, tmp_path / "x.gguf", "gemma3")
    with pytest.raises(ConfigError, match=r"x\.gguf: GGUF architecture 'gemma3' is not supported"):
        resolve_model(str(file))
    assert not [path for path in cache.iterdir() if not path.name.endswith((".lock", ".partial"))]


META: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 131072,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.rope.freq_base": 500000.0,
    "llama.rope.dimension_count": 16,
}
SHAPES: dict[str, tuple[int, ...]] = {"token_embd.weight": (100, 64)}


def test_config_of_plain_metadata() -> None:
    config = model_config(META, SHAPES)
    assert (config["head_dim"], config["vocab_size"]) == (16, 100)
    assert config["rms_norm_eps"] == 1e-05
    assert config["tie_word_embeddings"] and "rope_scaling" not in config


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama.expert_count", 8, "experts"),
        ("llama.rope.dimension_count", 8, "rope.dimension_count"),
        ("llama.attention.value_length", 8, "value_length"),
        ("llama.rope.scaling.type", "longrope", "longrope"),
        ("llama.context_length", None, "llama.context_length"),
    ],
)
def test_what_cannot_be_expressed_is_named(key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        model_config(META | {key: value}, SHAPES)


def test_an_unknown_tensor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = make_tiny_model("qwen3", tmp_path / "original")
    monkeypatch.delitem(gguf_conversion._TENSORS, "attn_q_norm")
    with pytest.raises(ConfigError, match="attn_q_norm"):
        convert(write_gguf(original, tmp_path / "x.gguf", "qwen3"), tmp_path / "converted")


# -- rotary embeddings --------------------------------------------------------------------------


def test_llama3_scaling_is_recovered_from_its_factors() -> None:
    """transformers' own frequencies, divided, are what a GGUF stores."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wide = META | {"llama.embedding_length": 256, "llama.rope.dimension_count": 64}
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=scaling | {"rope_theta": 500000.0},
    )
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
    factors = (500000.0 ** (-np.arange(32) / 32) / scaled).astype(np.float32)
    assert len(np.unique(factors.round(3))) > 3  # one, 32, and some in between
    assert model_config(wide, SHAPES, factors)["rope_scaling"] == scaling
    with pytest.raises(ConfigError, match="rope_freqs"):
        model_config(wide, SHAPES, factors + 0.5)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", None),
        ("linear", {"rope_type": "linear", "factor": 4.0}),
        (
            "yarn",
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        ),
    ],
)
def test_other_scalings_are_carried_over(kind: str, expected: dict[str, Any] | None) -> None:
    scaling = {
        "llama.rope.scaling.type": kind,
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32768,
    }
    assert model_config(META | scaling, SHAPES).get("rope_scaling") == expected


@pytest.mark.parametrize("shape", [(48, 7), (48,)])
def test_unpermuting_undoes_permuting(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    np.testing.assert_array_equal(unpermuted(permuted(array, 3), 3), array)
    assert not np.array_equal(permuted(array, 3), array)
