"""Fields of a request that we do not serve: which are harmless, which change the answer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from splitserve.errors import InvalidRequestError
from splitserve.logs import LimitedLog

log = LimitedLog(logging.getLogger(__name__))

# Accepted and ignored: they change nothing about the tokens.
HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",  # without tools
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "request_id",
    }
)

# They would change the answer. Each with the values that ask for nothing.
_OFF: tuple[Any, ...] = (None, False, [], {}, "")
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "tools": _OFF,
    "tool_choice": (*_OFF, "none", "auto"),
    "functions": _OFF,
    "function_call": (*_OFF, "none", "auto"),
    "response_format": (*_OFF, {"type": "text"}),
    "suffix": _OFF,
    "audio": _OFF,
    "modalities": (*_OFF, ["text"]),
    "prediction": _OFF,
    "reasoning_effort": (*_OFF, "none"),
    "verbosity": (*_OFF, "medium"),
    "web_search_options": _OFF,
    "structured_outputs": _OFF,
    "guided_json": _OFF,
    "guided_regex": _OFF,
    "guided_choice": _OFF,
    "guided_grammar": _OFF,
    "prompt_logprobs": _OFF,
    "use_beam_search": _OFF,
    "length_penalty": (*_OFF, 1, 1.0),
    "bad_words": _OFF,
    "allowed_token_ids": _OFF,
    "truncate_prompt_tokens": _OFF,
    "include_stop_str_in_output": _OFF,
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "add_special_tokens": (None, True),
    "add_generation_prompt": (None, True),
    "continue_final_message": _OFF,
    "chat_template": _OFF,
    "chat_template_kwargs": _OFF,
    "documents": _OFF,
    "prompt_embeds": _OFF,
    "logits_processors": _OFF,
}
# Completions take these, and check them themselves.
_CHAT_ONLY_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "echo": _OFF,
    "best_of": (None, 1),
}


def check_fields(body: Mapping[str, Any], known: frozenset[str], *, chat: bool) -> None:
    """Refuse a field that would change the answer and isn't served (InvalidRequestError, naming
    it); note unknown ones in the log."""
    unsupported = {**UNSUPPORTED, **(_CHAT_ONLY_UNSUPPORTED if chat else {})}
    unknown = []
    for name, value in body.items():
        if name in unsupported:
            if not any(_same(value, off) for off in unsupported[name]):
                raise InvalidRequestError(f"{name} is not supported", param=name)
        elif name not in known and name not in HARMLESS:
            unknown.append(name)
    if unknown:
        names = ", ".join(repr(name[:40]) for name in unknown[:8])
        log.warning("unknown fields", f"ignored unknown fields of a request: {names}")


def _same(value: Any, off: Any) -> bool:
    """Equal, and of one type: 1 is not True here."""
    return type(value) is type(off) and bool(value == off)
