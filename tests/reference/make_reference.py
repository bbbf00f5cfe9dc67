"""Makes reference.json: `python -m tests.reference.make_reference [--threads 1]`, several minutes.

transformers alone, f32, greedy, one prompt at a time, a KV cache, on SmolLM2-135M-Instruct. The
penalties are written out here once more, so that an error in ours can't hide in the reference.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from splitserve.models import model_facts, resolve_model
from tests.reference import REFERENCE_FILE

MODEL = "smollm2-135m"
PROSE = Path(__file__).with_name("prose.txt")
SEED = 20240917
NUM_PROSE = 200
MAX_PROMPT_TOKENS = 600
NUM_NAMED_TOKENS = 24
NUM_PROSE_TOKENS = 16

COUNTING = (
    "one two three four five six seven eight nine ten "
    "eleven twelve thirteen fourteen fifteen sixteen "
)
CAPITAL = "The capital of France is"
LAUGH = "ha ha ha ha ha ha"
QUESTIONS = (
    "Question: What is the text above about?\nAnswer:",
    "How often is the same passage repeated above? It is repeated",
    "In one sentence, the passage says that",
    "The first word of the passage is",
    "Translate the first line to English:",
)

Spec = dict[str, Any]


class Reference:
    """The model, the tokenizer, and a greedy loop around them."""

    def __init__(self) -> None:
        self.directory = resolve_model(MODEL).directory
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            self.directory, dtype=torch.float32
        )
        self.tokenizer = tokenizers.Tokenizer.from_file(str(self.directory / "tokenizer.json"))
        self.chat = transformers.PreTrainedTokenizerFast.from_pretrained(self.directory)
        self.eos_token_id = model_facts(self.directory).eos_token_ids[0]

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    @torch.inference_mode()
    def complete(self, spec: Spec, num_tokens: int) -> Spec:
        """`spec` with its greedy continuation; EOS does not end it."""
        output: list[int] = []
        margins, logprobs = [], []
        cache = None
        inputs = torch.tensor([spec["prompt_ids"]])
        for _ in range(num_tokens):
            result = self.model(inputs, past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            raw = result.logits[0, -1]
            logits = modified(raw, spec["prompt_ids"], output, spec.get("params", {}))
            best, runner_up = logits.topk(2).values.tolist()
            token_id = int(logits.argmax())
            output.append(token_id)
            margins.append(round(best - runner_up, 5))
            logprobs.append(round(float(raw.log_softmax(-1)[token_id]), 5))
            inputs = torch.tensor([[token_id]])
        return spec | {"token_ids": output, "margins": margins, "logprobs": logprobs}


def modified(
    raw: torch.Tensor, prompt_ids: list[int], output: list[int], params: dict[str, Any]
) -> torch.Tensor:
    """Logits [vocab] after penalties, bias and min_tokens; f32."""
    logits = raw.clone()
    repetition = params.get("repetition_penalty", 1.0)
    for token_id in {*prompt_ids, *output}:
        value = logits[token_id]
        logits[token_id] = value / repetition if value > 0 else value * repetition
    for token_id, count in Counter(output).items():
        logits[token_id] -= params.get("frequency_penalty", 0.0) * count
        logits[token_id] -= params.get("presence_penalty", 0.0)
    for token_id, bias in params.get("logit_bias", {}).items():
        logits[int(token_id)] += bias
    if len(output) < params.get("min_tokens", 0):
        logits[2] = -math.inf
    return logits


def named_specs(reference: Reference) -> Iterator[Spec]:
    hi = [{"role": "user", "content": "Hi"}]
    france = [{"role": "user", "content": "What is the capital of France?"}]
    rendered = {name: render(reference, m) for name, m in (("hi", hi), ("france", france))}
    after_hi = rendered["hi"] + "Hello! How can I assist you today?"
    yield {"name": "R1", "prompt": CAPITAL}
    yield {"name": "R2", "prompt": "1 2 3 4 5 6 7"}
    yield {"name": "R3", "prompt": "A B C D E F G"}
    yield {"name": "R4", "prompt": rendered["hi"], "messages": hi}
    yield {"name": "R6", "prompt": rendered["france"], "messages": france}
    yield {"name": "R7", "prompt": after_hi}
    yield {"name": "R7-min-tokens", "prompt": after_hi, "params": {"min_tokens": 2}}
    yield {"name": "R9", "prompt": "🤗" * 8}
    yield {"name": "P3", "prompt": LAUGH, "params": {"frequency_penalty": 1.0}}
    yield {"name": "P3-repetition", "prompt": LAUGH, "params": {"repetition_penalty": 1.3}}
    yield {"name": "P3-presence", "prompt": LAUGH, "params": {"presence_penalty": 2.0}}
    yield {"name": "B1", "prompt": CAPITAL, "params": {"logit_bias": {"7042": -100}}}
    yield {"name": "B2", "prompt": CAPITAL, "params": {"logit_bias": {"28589": 100}}}
    counting = reference.encode(COUNTING * 4)
    for k in (15, 16, 17, 31, 32, 33, 48, 64):
        yield {"name": f"L{k}", "prompt": reference.decode(counting[:k])}


def render(reference: Reference, messages: list[dict[str, str]]) -> str:
    text = reference.chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return str(text)


def prose_specs(reference: Reference) -> Iterator[Spec]:
    """Lengths log-uniform; each fifth repeats a passage and ends on a question about it."""
    generator = random.Random(SEED)
    text = PROSE.read_text(encoding="utf-8")
    starts = [match.start() for match in re.finditer(r"(?<=\s)\S", text)]
    for i in range(NUM_PROSE):
        length = round(math.exp(generator.uniform(0.0, math.log(MAX_PROMPT_TOKENS))))
        start = generator.choice(starts)
        question = generator.choice(QUESTIONS) if i % 5 == 4 and length > 40 else ""
        passage = (text[start:] + "\n" + text[:start])[: 8 * length]
        yield {"name": f"prose-{i}", "prompt": cut(reference, passage, length, question)}


def cut(reference: Reference, passage: str, num_tokens: int, question: str) -> str:
    """At most num_tokens of text. With a question: a quarter of that, three times, and it."""
    if question:
        body = cut(reference, passage, num_tokens // 4, "")
        return f"{body}\n\n" * 3 + question
    # A cut inside a character leaves U+FFFD, which is not in the text.
    return reference.decode(reference.encode(passage)[:num_tokens]).rstrip("\ufffd") or "A"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=REFERENCE_FILE)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    reference = Reference()
    content: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct, the Q4_1 GGUF dequantized to f32",
        "made_with": {"transformers": transformers.__version__, "torch": torch.__version__},
        "eos_token_id": reference.eos_token_id,
    }
    for part, specs, num_tokens in (
        ("named", list(named_specs(reference)), NUM_NAMED_TOKENS),
        ("prose", list(prose_specs(reference)), NUM_PROSE_TOKENS),
    ):
        content[part] = []
        for i, spec in enumerate(specs):
            spec["prompt_ids"] = reference.encode(spec["prompt"])
            content[part].append(reference.complete(spec, num_tokens))
            print(f"\r{part} {i + 1}/{len(specs)}", end="", flush=True)
        print()
    arguments.output.write_text(dumps(content), encoding="utf-8")


def dumps(content: dict[str, Any]) -> str:
    """JSON with one case on a line, so that a change shows as a change of a line."""
    lines = []
    for key, value in content.items():
        if isinstance(value, list):
            items = ",\n".join(compact(item) for item in value)
            lines.append(f"{compact(key)}: [\n{items}\n]")
        else:
            lines.append(f"{compact(key)}: {compact(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


if __name__ == "__main__":
    main()
