"""The bodies we take, strictly typed: "0.7" is no number, true is no integer, 3.5 no count.

Limits that need the model or the cluster (vocabulary, context) are checked in sampling.py and
prompts.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from splitserve.config import Role
from splitserve.errors import InvalidRequestError

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIASES = 256
MAX_TOP_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
MAX_PROFILE_S = 600.0
MAX_KERNEL_STEPS = 20

Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Messages = Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]

Schema = TypeVar("Schema", bound=BaseModel)

# Where pydantic would speak of its own types.
_RULES = {
    "stop": f"stop must be a string of 1 to {MAX_STOP_CHARS} characters, "
    f"or a list of at most {MAX_STOPS} of them",
}


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Generation(Strict):
    """What completions and chat share. None means: not said."""

    model: str | None = None
    n: Count | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[Number, Field(ge=-100, le=100)]],
            Field(max_length=MAX_LOGIT_BIASES),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_LOGIT_BIASES)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_timing: bool | None = None


class CompletionBody(Generation):
    prompt: Any = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Count | None = None


class ChatBody(Generation):
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class TokenizeBody(Strict):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None


class DetokenizeBody(Strict):
    model: str | None = None
    tokens: TokenIds


class ScaleBody(Strict):
    prefill: int
    decode: int


class ProfileBody(Strict):
    duration_s: Annotated[float, Field(ge=1.0, le=MAX_PROFILE_S)] = 30.0
    num_kernel_steps: Annotated[int, Field(ge=0, le=MAX_KERNEL_STEPS)] = 0


class RestartBody(Strict):
    pool: Role


def validate(schema: type[Schema], body: Mapping[str, Any]) -> Schema:
    """The body as its schema. Raises InvalidRequestError with the first thing that is wrong; what
    was sent is not quoted."""
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = [str(part) for part in first["loc"]]
        where = ".".join(path)[:200]
        text = _RULES.get(path[0]) or f"{where}: {first['msg']}"
        raise InvalidRequestError(text, param=path[0][:100]) from None


def fields_of(schema: type[BaseModel]) -> frozenset[str]:
    return frozenset(schema.model_fields)
