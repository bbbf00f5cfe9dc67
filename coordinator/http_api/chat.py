"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from coordinator.http_api.answers import ChoiceText, Format, answer, check_stream_options
from coordinator.http_api.body import read_object
from coordinator.http_api.fields import check_fields
from coordinator.http_api.logprobs import chat_logprobs
from coordinator.http_api.prompts import chat_prompt
from coordinator.http_api.sampling import order_of
from coordinator.http_api.schemas import ChatBody, fields_of, validate
from coordinator.http_api.served import check_model
from coordinator.service import Service
from splitserve.errors import InvalidRequestError

_FIELDS = fields_of(ChatBody)


async def chat_completions(service: Service, request: Request) -> Response:
    given = await read_object(request)
    check_model(service, given)
    check_fields(given, _FIELDS, chat=True)
    body = validate(ChatBody, given)
    _check(body)
    limits = service.limits()
    prompt = await chat_prompt(service, body.messages)
    order = order_of(
        service,
        body,
        prompt,
        default_max_tokens=limits.max_total_tokens,  # cut to the rest of the context
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return await answer(request, ChatFormat(service, body, [prompt]), [order])


def _check(body: ChatBody) -> None:
    check_stream_options(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")


class ChatFormat(Format):
    """How /v1/chat/completions writes answers."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    body: ChatBody

    def choice(self, index: int, text: ChoiceText) -> dict[str, Any]:
        message = {"role": "assistant", "content": text.text, "refusal": None}
        return self._choice(index, text, "message", message)

    def chunk_choice(self, index: int, text: ChoiceText, is_first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if is_first else {}
        if text.text:
            delta["content"] = text.text
        return self._choice(index, text, "delta", delta)

    def prompt_ids(self) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self.prompts[0].token_ids)}

    def _choice(
        self, index: int, text: ChoiceText, key: str, message: dict[str, Any]
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            key: message,
            "logprobs": None,
            "finish_reason": text.finish,
        }
        if self.body.logprobs:
            num_top = self.body.top_logprobs or 0
            choice["logprobs"] = chat_logprobs(self.service.tokenizer, text.tokens, num_top)
        if self.body.return_token_ids:
            choice["token_ids"] = text.token_ids
        return choice
