"""Writes a model directory as a GGUF, as llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_NORMAL, _CONTROL = 1, 3


def permuted(array: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """The row order llama.cpp gives Llama's q and k: row (head, half, i) to (head, i, half)."""
    size = array.shape[0] // num_heads
    order = [
        head * size + half * size // 2 + i
        for head in range(num_heads)
        for i in range(size // 2)
        for half in (0, 1)
    ]
    return array[order]


def write_gguf(directory: Path, path: Path, arch: str, chat_template: str | None = None) -> Path:
    """`directory` holds a tiny model of `arch` with a byte-level BPE tokenizer."""
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    _add_tokenizer(writer, directory, config, chat_template)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, array in load_file(directory / "model.safetensors").items():
        stem, suffix = name.rsplit(".", 1)
        if stem in _TOP:
            writer.add_tensor(f"{_TOP[stem]}.{suffix}", array)
            continue
        _, _, layer, part = stem.split(".", 3)
        if arch == "llama" and _PARTS[part] in heads:
            array = permuted(array, heads[_PARTS[part]])
        writer.add_tensor(f"blk.{layer}.{_PARTS[part]}.{suffix}", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(
    writer: gguf.GGUFWriter, directory: Path, config: dict[str, Any], chat_template: str | None
) -> None:
    content = json.loads((directory / "tokenizer.json").read_text())
    special = {token["id"]: token["content"] for token in content["added_tokens"]}
    plain = {i: token for token, i in content["model"]["vocab"].items()}
    # Readers want a merge; it goes to the token of a byte that UTF-8 never uses.
    tokens = special | plain | {255: "ab"}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens[i] for i in range(len(tokens))])
    writer.add_token_types([_CONTROL if i in special else _NORMAL for i in range(len(tokens))])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
