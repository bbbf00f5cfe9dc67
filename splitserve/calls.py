"""The HTTP calls of the client, as data: both clients send these, one waiting, one not."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitserve.errors import ConfigError
from splitserve.request import SamplingParams

DEFAULT_BASE_URL = "http://127.0.0.1:8000"
CONNECT_TIMEOUT_S = 10.0
TIMEOUT_S = 620.0  # a little over the server's own deadline, so that it answers first

Prompt = str | Sequence[int]
Conversation = str | Sequence[Mapping[str, Any]]

_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_OPTIONS = _SAMPLING | {
    "add_generation_prompt",
    "echo",
    "max_completion_tokens",
    "model",
    "priority",
    "return_timing",
    "return_token_ids",
    "stream_options",
    "suffix",
    "top_logprobs",
    "user",
    "x_request_id",
}


@dataclass(frozen=True, slots=True)
class Call:
    """One POST of a prompt. `body` lacks only the model's name."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]

    def with_model(self, model: str) -> dict[str, Any]:
        return {"model": model, **self.body}


def completion_call(
    prompt: Prompt, params: SamplingParams | None, stream: bool, options: Mapping[str, Any]
) -> Call:
    """Continue a prompt: text, or token ids. Raises TypeError for an option that is none."""
    form = prompt if isinstance(prompt, str) else list(prompt)
    return _call("/v1/completions", {"prompt": form}, _said(params, options), stream)


def chat_call(
    messages: Conversation, params: SamplingParams | None, stream: bool, options: Mapping[str, Any]
) -> Call:
    """Answer a conversation; a plain text is one message of the user."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    said = _said(params, options)
    if isinstance(said.get("logprobs"), int) and not isinstance(said["logprobs"], bool):
        said["top_logprobs"], said["logprobs"] = said["logprobs"], True  # as chat spells it
    return _call("/v1/chat/completions", {"messages": list(messages)}, said, stream)


def _call(path: str, start: dict[str, Any], said: dict[str, Any], stream: bool) -> Call:
    headers = {}
    if "x_request_id" in said:
        headers["x-request-id"] = str(said.pop("x_request_id"))
    body = start | said
    if stream:
        body = {"stream": True, "stream_options": {"include_usage": True}} | body
    return Call(path, body, headers)


def _said(params: SamplingParams | None, options: Mapping[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"unexpected option {name!r}")
    said = {} if params is None else dataclasses.asdict(params)
    said |= options
    if said.get("logit_bias"):
        said["logit_bias"] = {str(key): bias for key, bias in said["logit_bias"].items()}
    return {key: _plain(value) for key, value in said.items() if value not in (None, (), {})}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True)
class Address:
    """Where a cluster is, and the key it asks for."""

    base_url: str
    api_key: str | None

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def address_of(base_url: str | None, api_key: str | None) -> Address:
    """Fill in from SPLITSERVE_BASE_URL and SPLITSERVE_API_KEY, which may list several keys.

    Raises ConfigError for a URL that is not http(s).
    """
    url = base_url or os.environ.get("SPLITSERVE_BASE_URL") or DEFAULT_BASE_URL
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"base_url must start with http:// or https://, got {url!r}")
    key = api_key or os.environ.get("SPLITSERVE_API_KEY", "").split(",")[0].strip()
    return Address(url.rstrip("/").removesuffix("/v1"), key or None)
