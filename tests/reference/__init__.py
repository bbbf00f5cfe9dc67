"""What the model answers, computed by transformers in f32, and how to compare with it.

reference.json is made by `python -m tests.reference.make_reference`; prose.txt is the text its
varied prompts are cut from (older texts in the public domain, the rest written for this purpose).
"""

from __future__ import annotations

import enum
import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Two f32 implementations may round differently by this much; below it the top two may swap.
THIN_MARGIN = 2e-3
MAX_THIN_SHARE = 0.02
REFERENCE_FILE = Path(__file__).with_name("reference.json")


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and its greedy continuation, which goes on through EOS."""

    name: str
    prompt: str  # text whose encoding is prompt_ids
    prompt_ids: tuple[int, ...]
    messages: tuple[dict[str, str], ...]  # empty unless the prompt is a rendered chat
    params: dict[str, Any]  # sampling parameters besides temperature=0, by their OpenAI names
    token_ids: tuple[int, ...]
    margins: tuple[float, ...]  # by how much the chosen logit beat the next, penalties included
    logprobs: tuple[float, ...]  # of the chosen token, of the unmodified logits
    eos_token_id: int

    def answer(self, max_tokens: int, *, ignore_eos: bool = False) -> tuple[int, ...]:
        """The ids a server must return: at most max_tokens, EOS included and last."""
        assert max_tokens <= len(self.token_ids), f"{self.name} holds {len(self.token_ids)} tokens"
        ids = self.token_ids[:max_tokens]
        if not ignore_eos and self.eos_token_id in ids:
            return ids[: ids.index(self.eos_token_id) + 1]
        return ids


class Verdict(enum.Enum):
    EQUAL = "equal"
    THIN = "differs first where the reference's own margin is thin"
    WRONG = "wrong"


def compare(
    case: Case, got: Sequence[int], max_tokens: int, *, ignore_eos: bool = False
) -> Verdict:
    """`got` against the reference's answer to the same request. A cut answer is wrong."""
    want = case.answer(max_tokens, ignore_eos=ignore_eos)
    if tuple(got) == want:
        return Verdict.EQUAL
    pairs = zip(got, want, strict=False)
    first = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    # None: one is the beginning of the other, and no rounding explains that.
    thin = first is not None and case.margins[first] < THIN_MARGIN
    return Verdict.THIN if thin else Verdict.WRONG


def tolerable(verdicts: Iterable[Verdict]) -> bool:
    """Nothing wrong, and few enough thin margins that they can't hide an error."""
    all_verdicts = list(verdicts)
    num_thin = all_verdicts.count(Verdict.THIN)
    return Verdict.WRONG not in all_verdicts and num_thin <= MAX_THIN_SHARE * len(all_verdicts)


@functools.cache
def named_cases() -> dict[str, Case]:
    """Small prompts with a reason each: hand-off, penalties, EOS, emoji, block borders."""
    return {case.name: case for case in _load("named")}


@functools.cache
def prose_cases() -> tuple[Case, ...]:
    """200 varied prompts of 1 to 600 tokens, 16 tokens of answer each."""
    return tuple(_load("prose"))


def _load(part: str) -> list[Case]:
    content = json.loads(REFERENCE_FILE.read_text(encoding="utf-8"))
    eos_token_id = content["eos_token_id"]
    return [
        Case(
            name=item["name"],
            prompt=item["prompt"],
            prompt_ids=tuple(item["prompt_ids"]),
            messages=tuple(item.get("messages", ())),
            params=item.get("params", {}),
            token_ids=tuple(item["token_ids"]),
            margins=tuple(item["margins"]),
            logprobs=tuple(item["logprobs"]),
            eos_token_id=eos_token_id,
        )
        for item in content[part]
    ]
