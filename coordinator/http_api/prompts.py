"""Prompts as token ids, whatever form they came in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.service import Service
from splitserve.errors import InvalidRequestError

TEXT_ROLES = frozenset({"system", "developer", "user", "assistant"})
MAX_CHARS_PER_TOKEN = 256  # no tokenizer we know has a longer token; text beyond can't fit


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
    prompts = []
    for form in forms:
        if isinstance(form, str):
            prompts.append(Prompt(await _encode(service, form), form))
        else:
            prompts.append(Prompt(check_ids(form, service.facts.vocab_size, "prompt")))
    if not all(one.token_ids for one in prompts):
        raise InvalidRequestError("a prompt has no tokens", param="prompt")
    return prompts


async def chat_prompt(service: Service, messages: Sequence[Mapping[str, Any]]) -> Prompt:
    """A conversation by the model's own template. Raises InvalidRequestError."""
    plain = [_plain_message(i, message) for i, message in enumerate(messages)]
    num_characters = sum(len(message["content"]) for message in plain)
    _check_length(service, num_characters, "messages")
    token_ids = await service.off_loop(
        lambda: service.tokenizer.apply_chat_template(plain), num_characters
    )
    if not token_ids:
        raise InvalidRequestError("the messages have no tokens", param="messages")
    return Prompt(tuple(token_ids))


def check_ids(form: Sequence[Any], vocab_size: int, param: str) -> tuple[int, ...]:
    """Token ids, each in the vocabulary. Raises InvalidRequestError."""
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


async def _encode(service: Service, text: str) -> tuple[int, ...]:
    check_text(text, "prompt")
    _check_length(service, len(text), "prompt")
    return tuple(await service.off_loop(lambda: service.tokenizer.encode(text), len(text)))


def _check_length(service: Service, num_characters: int, param: str) -> None:
    """Text that can't fit, whatever its tokens are, is not worth tokenizing."""
    limit = service.limits().max_prompt_tokens
    if num_characters > limit * MAX_CHARS_PER_TOKEN:
        raise InvalidRequestError(
            f"{param} has {num_characters} characters, the limit is {limit} tokens",
            param=param,
            code="context_length_exceeded",
        )


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
