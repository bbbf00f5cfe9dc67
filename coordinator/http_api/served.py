"""Routes about the served model: its names, its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Request, Response

from coordinator.http_api.body import read_object
from coordinator.http_api.errors import JsonResponse
from coordinator.http_api.prompts import chat_prompt, check_ids, check_length, check_text
from coordinator.http_api.schemas import DetokenizeBody, TokenizeBody, validate
from coordinator.service import Service
from splitserve.errors import InvalidRequestError, ModelNotFoundError, UnavailableError


def check_model(service: Service, body: Mapping[str, Any]) -> None:
    """A request that names no model means the one served. Raises ModelNotFoundError."""
    name = body.get("model")
    if name is None:
        return
    if not isinstance(name, str):
        raise InvalidRequestError("model must be a string", param="model")
    served = service.config.served_model_names
    if name not in served:
        raise ModelNotFoundError(
            f"the model {name[:200]!r} is not served here; {', '.join(served)} is"
        )


async def models(service: Service, _request: Request) -> Response:
    entries = [_entry(service, name) for name in service.config.served_model_names]
    return JsonResponse({"object": "list", "data": entries})


async def model(service: Service, request: Request) -> Response:
    name = request.path_params["model"]
    check_model(service, {"model": name})
    return JsonResponse(_entry(service, name))


def _entry(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "splitserve",
        "root": service.config.model_name,
        "max_model_len": _max_model_len(service),
    }


def _max_model_len(service: Service) -> int:
    """The longest sequence this cluster takes; the model's own limit before that is known."""
    try:
        return service.limits().max_total_tokens
    except UnavailableError:
        return service.facts.max_model_len


async def tokenize(service: Service, request: Request) -> Response:
    given = await read_object(request)
    check_model(service, given)
    body = validate(TokenizeBody, given)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", param="prompt")
    if body.messages is not None:
        token_ids = list((await chat_prompt(service, body.messages)).token_ids)
    else:
        assert body.prompt is not None
        check_length(len(body.prompt), _max_model_len(service), "prompt")
        text = check_text(body.prompt, "prompt")
        token_ids = await service.off_loop(lambda: service.tokenizer.encode(text), len(text))
    return JsonResponse(
        {
            "count": len(token_ids),
            "max_model_len": _max_model_len(service),
            "tokens": token_ids,
        }
    )


async def detokenize(service: Service, request: Request) -> Response:
    given = await read_object(request)
    check_model(service, given)
    _check_num_ids(given.get("tokens"), _max_model_len(service))
    body = validate(DetokenizeBody, given)
    ids = check_ids(body.tokens, service.facts.vocab_size, "tokens")
    text = await service.off_loop(lambda: service.tokenizer.decode(ids), len(ids))
    return JsonResponse({"prompt": text})


def _check_num_ids(ids: Any, most: int) -> None:
    """Raises InvalidRequestError for more ids than any answer has."""
    if isinstance(ids, list) and len(ids) > most:
        raise InvalidRequestError(f"{len(ids)} tokens, the limit is {most}", param="tokens")
