"""Prompts as token ids, whatever form they came in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.service import Service
from splitserve.errors import InvalidRequestError

TEXT_ROLES = frozenset({"system", "developer", "user", "assistant"})
# No natural text averages more, over all of a context. Tokenizing keeps the interpreter to itself,
# so text that won't fit must not get that far.
MAX_CHARS_PER_TOKEN = 32
MAX_CHARS = 1 << 20


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    text: str | None = None  # as given; None when it came as ids


async def completion_prompts(service: Service, prompt: Any) -> list[Prompt]:
    """One prompt or several: a text, texts, token ids, or lists of token ids.

    Raises InvalidRequestError for anything else, for none, and for an empty one.
    """
    forms = _forms(prompt)
    if not forms:
        raise InvalidRequestError("prompt is empty", param="prompt")
    if len(forms) > service.config.max_queue:
        raise InvalidRequestError(
            f"{len(forms)} prompts in one call, the limit is {service.config.max_queue}",
            param="prompt",
        )
    limits = service.limits()
    for form in forms:  # all lengths before any content
        if isinstance(form, str):
            check_length(len(form), limits.max_prompt_tokens, "prompt")
        else:
            limits.check_prompt(len(form))
    return [await _prompt(service, form) for form in forms]


async def _prompt(service: Service, form: str | list[Any]) -> Prompt:
    if isinstance(form, str):
        text = check_text(form, "prompt")
        ids = await service.off_loop(lambda: service.tokenizer.encode(text), len(text))
        prompt = Prompt(check_ids(ids, service.facts.vocab_size, "prompt"), text)
        service.limits().check_prompt(len(ids))  # at once: the next ones may be as long
    else:
        prompt = Prompt(check_ids(form, service.facts.vocab_size, "prompt"))
    if not prompt.token_ids:
        raise InvalidRequestError("a prompt has no tokens", param="prompt")
    return prompt


async def chat_prompt(service: Service, messages: Sequence[Mapping[str, Any]]) -> Prompt:
    """A conversation by the model's own template. Raises InvalidRequestError."""
    limit = service.limits().max_prompt_tokens
    if len(messages) > limit:
        raise InvalidRequestError(
            f"{len(messages)} messages, the limit is {limit} tokens",
            param="messages",
            code="context_length_exceeded",
        )
    plain = [_plain_message(i, message) for i, message in enumerate(messages)]
    num_characters = sum(len(message["content"]) for message in plain)
    check_length(num_characters, limit, "messages")
    token_ids = await service.off_loop(
        lambda: service.tokenizer.apply_chat_template(plain), num_characters
    )
    if not token_ids:
        raise InvalidRequestError("the messages have no tokens", param="messages")
    return Prompt(check_ids(token_ids, service.facts.vocab_size, "messages"))


def check_ids(form: Sequence[Any], vocab_size: int, param: str) -> tuple[int, ...]:
    """Token ids, each in the vocabulary. Raises InvalidRequestError.

    A tokenizer's too: it may know tokens that were added without making the model larger.
    """
    if any(type(token_id) is not int for token_id in form):
        raise InvalidRequestError(f"{param} mixes token ids with something else", param=param)
    if form and not (0 <= min(form) and max(form) < vocab_size):
        raise InvalidRequestError(
            f"a token id is not in 0 to {vocab_size - 1}, the vocabulary", param=param
        )
    return tuple(form)


def check_text(text: str, param: str) -> str:
    """Text that can be encoded: half of a surrogate pair can't. Raises InvalidRequestError."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{param} holds half a surrogate pair", param=param) from error
    return text


def check_length(num_characters: int, max_tokens: int, param: str) -> None:
    """Text that won't fit is not worth tokenizing. Raises InvalidRequestError."""
    most = min(MAX_CHARS, max_tokens * MAX_CHARS_PER_TOKEN)
    if num_characters > most:
        raise InvalidRequestError(
            f"{param} has {num_characters} characters, the limit is {most} "
            f"(and {max_tokens} tokens)",
            param=param,
            code="context_length_exceeded",
        )


def _forms(prompt: Any) -> list[str | list[Any]]:
    """The prompts of a call, still as text or as lists of what should be ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise InvalidRequestError(
            "prompt must be a string, a list of strings, of token ids, or of lists of token ids",
            param="prompt",
        )
    if all(isinstance(item, str) for item in prompt):
        return list(prompt)
    if all(isinstance(item, list) for item in prompt):
        return list(prompt)
    return [prompt]


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, str]:
    """A message with role and text only. Raises InvalidRequestError for any other kind."""
    where = f"messages.{index}"
    role = message.get("role")
    if not isinstance(role, str) or role not in TEXT_ROLES:
        raise InvalidRequestError(
            f"{where}.role must be one of {', '.join(sorted(TEXT_ROLES))}", param="messages"
        )
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise InvalidRequestError(f"{where}.{name} is not supported", param="messages")
    return {"role": role, "content": _content(where, message.get("content"))}


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return check_text(content, "messages")
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"{where}.content must be a string or a list of text parts", param="messages"
        )
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise InvalidRequestError(
                f"{where}.content has a part that is not text", param="messages"
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequestError(f"{where}.content has a part without text", param="messages")
        texts.append(check_text(text, "messages"))
    return "".join(texts)
