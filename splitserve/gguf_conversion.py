"""Turns a GGUF into a Hugging Face directory: `python -m splitserve.gguf_conversion GGUF DIR PID`.

A process of its own, because building the tokenizer loads torch; it dies with its parent PID.
Under a file lock, and by rename: concurrent starts convert once, and DIR is whole or not there.

Weights are dequantized to f32. llama.cpp stores the rows of Llama's query and key projections in
the order its own rotary embedding wants (pairs side by side instead of halves); they are put back.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from splitserve.errors import ConfigError, SplitserveError
from splitserve.process import die_with_parent

Array = npt.NDArray[np.float32]

SHARD_BYTES = 2 << 30  # a shard is written once it holds this much
# GGUF architecture → (model_type, class, whether q and k rows are permuted)
_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM", True),
    "mistral": ("mistral", "MistralForCausalLM", True),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", False),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", False),
}
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
# Llama 3.1's scaling; a GGUF keeps only the resulting factors, one a frequency.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


def convert(gguf_file: Path, target: Path) -> None:
    """Writes `target`, unless another process has by now. Waits for that other one.

    Raises ConfigError, naming it, for an architecture or a feature that isn't supported.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel when its holder dies
        if target.is_dir():
            return
        partial = target.parent / f"{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # of a conversion that was interrupted
        partial.mkdir()
        _write(gguf_file, partial)
        partial.rename(target)


def _write(gguf_file: Path, directory: Path) -> None:
    import gguf

    reader = gguf.GGUFReader(gguf_file)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    shapes = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors}
    factors = next((t.data for t in reader.tensors if t.name == _ROPE_FACTORS), None)
    config = model_config(meta, shapes, None if factors is None else np.asarray(factors))
    _write_json(directory / "config.json", config)
    special = {k: v for k, v in config.items() if k.endswith("_token_id")}
    _write_json(directory / "generation_config.json", special)
    _write_tokenizer(gguf_file, directory)
    tensors = (
        (t.name, gguf.dequantize(t.data, t.tensor_type).astype(np.float32, copy=False))
        for t in reader.tensors
        if t.name != _ROPE_FACTORS
    )
    _write_weights(_renamed(tensors, config, meta["general.architecture"]), directory)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_tokenizer(gguf_file: Path, directory: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    tokenizer.save_pretrained(directory, save_jinja_files=False)


# -- configuration --------------------------------------------------------------------------------


def model_config(
    meta: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    rope_factors: npt.NDArray[np.float32] | None = None,
) -> dict[str, Any]:
    """config.json's content from GGUF metadata, tensor shapes [rows, columns] and rope_freqs."""
    arch = meta["general.architecture"]
    if arch not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ConfigError(f"GGUF architecture {arch!r} is not supported (supported: {known})")
    if meta.get(f"{arch}.expert_count"):
        raise ConfigError(f"GGUF architecture {arch!r} with experts is not supported")
    model_type, class_name, _ = _ARCHITECTURES[arch]

    def get(key: str, default: Any = None) -> Any:
        value = meta.get(f"{arch}.{key}", default)
        if value is None:
            raise ConfigError(f"the GGUF lacks {arch}.{key}")
        return value

    heads = get("attention.head_count")
    head_dim = get("attention.key_length", get("embedding_length") // heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if get(key, head_dim) != head_dim:
            raise ConfigError(f"{arch}.{key} of {get(key)} with heads of {head_dim}: not supported")
    config = {
        "architectures": [class_name],
        "model_type": model_type,
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": _decimal(get("attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(get("rope.freq_base", 10000.0)),
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    if model_type == "mistral":
        config["sliding_window"] = meta.get(f"{arch}.attention.sliding_window")
    if scaling := _rope_scaling(meta, arch, rope_factors, config):
        config["rope_scaling"] = scaling
    return config | _special_tokens(meta)


def _decimal(value: float) -> float:
    """The shortest decimal that rounds to this f32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _special_tokens(meta: dict[str, Any]) -> dict[str, Any]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    ids = {k: meta.get(f"tokenizer.ggml.{v}_token_id") for k, v in names.items()}
    return {f"{k}_token_id": v for k, v in ids.items() if v is not None}


def _rope_scaling(
    meta: dict[str, Any], arch: str, factors: Array | None, config: dict[str, Any]
) -> dict[str, Any] | None:
    if factors is not None:
        return _llama3_scaling(factors, config)
    kind = meta.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"rope scaling {kind!r} of a GGUF is not supported")
    scaling = {"rope_type": kind, "factor": float(meta[f"{arch}.rope.scaling.factor"])}
    original = meta.get(f"{arch}.rope.scaling.original_context_length")
    if kind == "yarn" and original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(factors: Array, config: dict[str, Any]) -> dict[str, Any]:
    """The parameters that yield `factors` [head_dim / 2] by Llama 3.1's rule, checked."""
    half = config["head_dim"] // 2
    factor = float(factors.max())
    wavelengths = 2 * np.pi * config["rope_theta"] ** (np.arange(half) / half)
    low, high = _LLAMA3_ORIGINAL / _LLAMA3_LOW, _LLAMA3_ORIGINAL / _LLAMA3_HIGH
    smooth = (_LLAMA3_ORIGINAL / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    between = 1 / ((1 - smooth) / factor + smooth)
    expected = np.where(wavelengths > low, factor, np.where(wavelengths < high, 1.0, between))
    if factors.shape != (half,) or not np.allclose(factors, expected, rtol=1e-3):
        raise ConfigError("rope_freqs of the GGUF do not follow Llama 3.1's rule: not supported")
    return {
        "rope_type": "llama3",
        "factor": round(factor, 6),
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }


# -- weights --------------------------------------------------------------------------------------


def _renamed(
    tensors: Iterator[tuple[str, Array]], config: dict[str, Any], arch: str
) -> Iterator[tuple[str, Array]]:
    """GGUF names and row order → Hugging Face's."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, array in tensors:
        *block, part, suffix = name.split(".")
        if part not in _TENSORS or suffix not in ("weight", "bias"):
            raise ConfigError(f"the GGUF has a tensor {name!r}, which is not supported")
        if _ARCHITECTURES[arch][2] and part in heads:
            array = unpermuted(array, heads[part])
        layer = f"model.layers.{block[1]}." if block else ""
        yield f"{layer}{_TENSORS[part]}.{suffix}", array


def unpermuted(array: Array, num_heads: int) -> Array:
    """Rows [heads, half, 2] back to [heads, 2, half]; `array` is a weight or a bias."""
    half = array.shape[0] // num_heads // 2
    rows = array.reshape(num_heads, half, 2, *array.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(rows.reshape(array.shape))


def _write_weights(tensors: Iterator[tuple[str, Array]], directory: Path) -> None:
    """Shards of about SHARD_BYTES, so that memory holds one at a time, and an index of them.

    A model of one shard is model.safetensors, without an index, as everyone writes it.
    """
    from safetensors.numpy import save_file

    shard: dict[str, Array] = {}
    weight_map: dict[str, str] = {}
    num_bytes = total_bytes = 0

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shard, directory / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, array in tensors:
        shard[name] = array
        num_bytes += array.nbytes
        total_bytes += array.nbytes
        if num_bytes >= SHARD_BYTES:
            flush()
            num_bytes = 0
    if shard:
        flush()
    if len(set(weight_map.values())) == 1:
        (directory / weight_map[name]).rename(directory / "model.safetensors")
        return
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)


def main() -> int:
    gguf_file, target, parent_pid = sys.argv[1:]
    die_with_parent(int(parent_pid))
    try:
        convert(Path(gguf_file), Path(target))
    except SplitserveError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
