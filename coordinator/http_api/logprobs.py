"""Log-probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.output import OutputToken
from splitserve.request import TokenLogprobs
from splitserve.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # JSON has no -inf


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[OutputToken], offset: int = 0
) -> dict[str, Any]:
    """As /v1/completions has them; `offset` is added to every text_offset."""
    entries = [(one.token.token_id, one.token.logprobs) for one in tokens]
    return {
        "tokens": [tokenizer.token_text(token_id) for token_id, _ in entries],
        "token_logprobs": [None if e is None else _clamped(e.logprob) for _, e in entries],
        "top_logprobs": [
            None if e is None else _by_text(tokenizer, token_id, e) for token_id, e in entries
        ],
        "text_offset": [offset + one.offset for one in tokens],
    }


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[OutputToken], num_top: int
) -> dict[str, Any]:
    """As /v1/chat/completions has them."""
    content = []
    for one in tokens:
        token_id, entry = one.token.token_id, one.token.logprobs
        top = entry.top[:num_top] if entry else ()
        content.append(
            {
                **_chat_entry(tokenizer, token_id, entry.logprob if entry else None),
                "top_logprobs": [_chat_entry(tokenizer, *pair) for pair in top],
            }
        )
    return {"content": content, "refusal": None}


def _by_text(tokenizer: Tokenizer, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
    """Text → logprob, the likeliest first, and the sampled token's if it isn't among them.

    Tokens whose texts are equal (parts of characters, mostly) are told apart by their ids.
    """
    found: dict[str, float] = {}
    sampled = [] if any(i == token_id for i, _ in entry.top) else [(token_id, entry.logprob)]
    for other_id, logprob in [*entry.top, *sampled]:
        text = tokenizer.token_text(other_id)
        found[f"token_id:{other_id}" if text in found else text] = _clamped(logprob)
    return found


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": None if logprob is None else _clamped(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _clamped(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
