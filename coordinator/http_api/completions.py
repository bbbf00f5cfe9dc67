"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from coordinator.http_api.answers import ChoiceText, Format, answer, check_stream_options
from coordinator.http_api.body import read_object
from coordinator.http_api.fields import check_fields
from coordinator.http_api.logprobs import completion_logprobs
from coordinator.http_api.prompts import completion_prompts
from coordinator.http_api.sampling import order_of
from coordinator.http_api.schemas import CompletionBody, fields_of, validate
from coordinator.http_api.served import check_model
from coordinator.service import Service
from splitserve.errors import InvalidRequestError

DEFAULT_MAX_TOKENS = 16
_FIELDS = fields_of(CompletionBody)


async def completions(service: Service, request: Request) -> Response:
    given = await read_object(request)
    check_model(service, given)
    check_fields(given, _FIELDS, chat=False)
    if given.get("echo") and given.get("max_tokens") == 0:
        raise InvalidRequestError("echo with max_tokens 0 is not supported", param="echo")
    body = validate(CompletionBody, given)
    _check(body)
    service.limits()
    prompts = await completion_prompts(service, body.prompt)
    orders = [
        order_of(
            service,
            body,
            prompt,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            logprobs=body.logprobs,
        )
        for prompt in prompts
    ]
    return await answer(request, CompletionFormat(service, body, prompts), orders)


def _check(body: CompletionBody) -> None:
    check_stream_options(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequestError("best_of other than n is not supported", param="best_of")
    if body.echo and body.logprobs is not None:
        raise InvalidRequestError("echo with logprobs is not supported", param="echo")


class CompletionFormat(Format):
    """How /v1/completions writes answers."""

    id_prefix = "cmpl"
    object_name = chunk_object_name = "text_completion"
    body: CompletionBody

    def choice(self, index: int, text: ChoiceText) -> dict[str, Any]:
        return self._choice(index, text, is_first=True)

    def chunk_choice(self, index: int, text: ChoiceText, is_first: bool) -> dict[str, Any]:
        return self._choice(index, text, is_first)

    def _choice(self, index: int, text: ChoiceText, is_first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": (self._echo(index) if is_first else "") + text.text,
            "logprobs": None,
            "finish_reason": text.finish,
        }
        if self.body.logprobs is not None:
            choice["logprobs"] = completion_logprobs(self.service.tokenizer, text.tokens)
        if self.body.return_token_ids:
            choice["token_ids"] = text.token_ids
            if is_first and index % self.num_choices == 0:
                choice["prompt_token_ids"] = list(self.prompt_of(index).token_ids)
        return choice

    def _echo(self, index: int) -> str:
        if not self.body.echo:
            return ""
        prompt = self.prompt_of(index)
        if prompt.text is not None:
            return prompt.text
        return self.service.tokenizer.decode(prompt.token_ids)
