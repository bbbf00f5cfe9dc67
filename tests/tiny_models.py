"""Tiny random checkpoints, made on the spot: a whole model directory in a second, no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

NUM_BYTES = 256
BOS, EOS, TURN_START, TURN_END = "<s>", "</s>", "<|im_start|>", "<|im_end|>"
SPECIALS = (BOS, EOS, TURN_START, TURN_END)
BOS_ID, EOS_ID = NUM_BYTES, NUM_BYTES + 1
VOCAB_SIZE = NUM_BYTES + len(SPECIALS)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "initializer_range": 0.2,  # far-apart logits, so that greedy tokens are not near-ties
}


def make_tiny_llama(directory: Path | str, **overrides: Any) -> Path:
    """A Llama of two layers with a byte tokenizer; `overrides` are config.json's keys."""
    return make_tiny_model("llama", directory, **overrides)


def make_tiny_model(
    model_type: str, directory: Path | str, *, seed: int = 0, shard_size: str = "5GB", **keys: Any
) -> Path:
    """The same of another family. Equal arguments make equal weights."""
    path = Path(directory)
    config = AutoConfig.for_model(model_type, **{**LLAMA, **keys})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=keys.get("dtype", torch.float32))
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases start as zeros and norms as ones: stir them
                parameter.data.add_(torch.randn_like(parameter) * 0.2)
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    model.save_pretrained(path, max_shard_size=shard_size)
    if shown:
        logging.enable_progress_bar()
    byte_tokenizer().save_pretrained(path)
    return path


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Token i is byte i; four special tokens follow. It adds no bos by itself."""
    vocab = {character: byte for byte, character in enumerate(_byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself where it prints, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    return [
        chr(byte) if byte in printable else chr(0x100 + others.index(byte))
        for byte in range(NUM_BYTES)
    ]
