"""What a client gets: answers and chunks as typed objects, and HTTP errors as exceptions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from splitserve.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    RequestFailedError,
    SplitserveError,
    StreamBrokenError,
    UnavailableError,
)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted by the server. A sum over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer. `token_ids` when asked for with return_token_ids; `logprobs` as sent."""

    index: int
    text: str
    finish_reason: str | None
    token_ids: tuple[int, ...] | None = None
    logprobs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The whole answer to one prompt. `timing` when asked for with return_timing."""

    id: str
    model: str
    choices: tuple[Choice, ...]
    usage: Usage | None
    timing: Mapping[str, Any] | None = None
    prompt_token_ids: tuple[int, ...] | None = None

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> Mapping[str, Any] | None:
        return self.choices[0].logprobs


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer: text of one choice, or (at the end) usage and timing."""

    index: int
    text: str
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: Mapping[str, Any] | None = None
    usage: Usage | None = None
    timing: Mapping[str, Any] | None = None
    prompt_token_ids: tuple[int, ...] | None = None


def answer_from(body: Mapping[str, Any]) -> Answer:
    """An Answer from the JSON of a completion or a chat completion."""
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    return Answer(
        id=body.get("id", ""),
        model=body.get("model", ""),
        choices=tuple(
            Choice(
                choice["index"],
                _text(choice, "message"),
                choice.get("finish_reason"),
                _ids(choice.get("token_ids")),
                choice.get("logprobs"),
            )
            for choice in choices
        ),
        usage=_usage(body.get("usage")),
        timing=body.get("timing"),
        prompt_token_ids=_prompt_ids(body),
    )


def chunk_from(data: bytes) -> Chunk:
    """A Chunk from one event of a stream. Raises RequestFailedError for an error event."""
    try:
        body = json.loads(data)
    except ValueError as error:
        raise StreamBrokenError(f"an event of the stream is not JSON: {error}") from error
    if "error" in body:
        detail = body["error"]
        message = str(detail.get("message", detail))
        raise RequestFailedError(message, stage=detail.get("stage", "internal"))
    choice = body["choices"][0] if body.get("choices") else {}
    return Chunk(
        index=choice.get("index", 0),
        text=_text(choice, "delta"),
        finish_reason=choice.get("finish_reason"),
        token_ids=_ids(choice.get("token_ids")),
        logprobs=choice.get("logprobs"),
        usage=_usage(body.get("usage")),
        timing=body.get("timing"),
        prompt_token_ids=_prompt_ids(body),
    )


def error_from(status: int, body: bytes, headers: Mapping[str, str]) -> SplitserveError:
    """The exception for an HTTP status of 400 or more."""
    try:
        detail = json.loads(body)["error"]
        message, code = str(detail["message"]), detail.get("code")
        param = detail.get("param")
    except (ValueError, KeyError, TypeError):
        text = body[:500].decode(errors="replace")
        message, code, param = f"HTTP {status}: {text}", None, None
    if status == 401:
        message += " (--api-key or SPLITSERVE_API_KEY)"
    if status == 429:
        return OverloadedError(message, retry_after_s=_seconds(headers.get("retry-after")))
    if status == 404 and code == "model_not_found":
        return ModelNotFoundError(message)
    if status < 500:
        return InvalidRequestError(message, param=param, code=code, status=status)
    if status == 503:
        return UnavailableError(message)
    return RequestFailedError(message, status=status)


def _seconds(text: str | None) -> float:
    try:
        return max(float(text or 1.0), 0.0)
    except ValueError:  # an HTTP date: also allowed there
        return 1.0


def _text(choice: Mapping[str, Any], chat_key: str) -> str:
    chat = choice.get(chat_key) or {}
    return str(choice.get("text") or chat.get("content") or "")


def _ids(ids: Any) -> tuple[int, ...] | None:
    return None if ids is None else tuple(ids)


def _prompt_ids(body: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Where vLLM and we put them: at the top for chat, in the first choice for completions."""
    choice = body["choices"][0] if body.get("choices") else {}
    return _ids(body.get("prompt_token_ids") or choice.get("prompt_token_ids"))


def _usage(body: Any) -> Usage | None:
    if body is None:
        return None
    details = body.get("prompt_tokens_details") or {}
    return Usage(
        body["prompt_tokens"],
        body.get("completion_tokens", 0),
        body["total_tokens"],
        details.get("cached_tokens") or 0,
    )
