"""The client that waits. `AsyncClient` is the same, awaited; both are found here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Self, overload

import httpx

from splitserve.answers import Answer, answer_from, error_from
from splitserve.async_client import AsyncClient
from splitserve.calls import (
    TIMEOUT_S,
    Call,
    Conversation,
    Prompt,
    address_of,
    chat_call,
    completion_call,
)
from splitserve.config import Role
from splitserve.jobs import AsyncJob, Job
from splitserve.request import SamplingParams
from splitserve.streams import AsyncStream, Stream, decoded, failure_of, http_options

__all__ = ["AsyncClient", "AsyncJob", "AsyncStream", "Client", "Job", "Stream"]


class Client:
    """Owns a connection pool to one cluster.

    `base_url` and `api_key` default to SPLITSERVE_BASE_URL and SPLITSERVE_API_KEY. Errors of the
    server come as the exceptions of splitserve.errors. Keyword options of `generate` and `chat`
    are the fields of SamplingParams and of the HTTP API, such as return_timing=True.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        model: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._address = address_of(base_url, api_key)
        self._timeout_s = timeout_s
        self._model = model
        self._http = httpx.Client(**http_options(self._address, timeout_s))

    @property
    def base_url(self) -> str:
        return self._address.base_url

    @property
    def model(self) -> str:
        """The name of the served model; asked for once."""
        if self._model is None:
            self._model = self._json("GET", "/v1/models")["data"][0]["id"]
        return self._model

    @overload
    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        **options: Any,
    ) -> Answer: ...

    @overload
    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        **options: Any,
    ) -> Stream: ...

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        **options: Any,
    ) -> Answer | Stream:
        """Continue a prompt: text, or token ids. With stream=True, an iterator of Chunks."""
        return self._send(completion_call(prompt, params, stream, options), stream)

    @overload
    def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        **options: Any,
    ) -> Answer: ...

    @overload
    def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        **options: Any,
    ) -> Stream: ...

    def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        **options: Any,
    ) -> Answer | Stream:
        """Answer a conversation: messages with role and content, or one text of the user."""
        return self._send(chat_call(messages, params, stream, options), stream)

    def submit(self, prompts: Iterable[Prompt], *, concurrency: int = 32, **options: Any) -> Job:
        """Start many prompts in the background, `concurrency` at a time; overload is retried."""

        def connect() -> AsyncClient:
            address = self._address
            return AsyncClient(
                address.base_url, address.api_key, model=self._model, timeout_s=self._timeout_s
            )

        return Job(connect, list(prompts), concurrency, options)

    def cluster(self) -> dict[str, Any]:
        """GET /cluster: targets, the coordinator, and the state of every worker."""
        return self._json("GET", "/cluster")

    def scale(self, *, prefill: int, decode: int) -> dict[str, Any]:
        """Set the wanted numbers of workers; returns at once, with the target."""
        return self._json("POST", "/cluster/scale", {"prefill": prefill, "decode": decode})

    def restart(self, pool: Role) -> dict[str, Any]:
        """Begin to replace the workers of a pool one by one; returns at once, with their ids."""
        return self._json("POST", "/cluster/restart", {"pool": pool})

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _send(self, call: Call, stream: bool) -> Answer | Stream:
        body = call.with_model(self.model)
        request = self._http.build_request("POST", call.path, json=body, headers=call.headers)
        response = self._exchange(request, stream)
        return Stream(response) if stream else answer_from(decoded(response))

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return decoded(self._exchange(self._http.build_request(method, path, json=body), False))

    def _exchange(self, request: httpx.Request, stream: bool) -> httpx.Response:
        try:
            response = self._http.send(request, stream=stream)
            if response.is_error:
                response.read()
        except httpx.TransportError as error:
            raise failure_of(self._address, error) from error
        if response.is_error:
            response.close()
            raise error_from(response.status_code, response.content, response.headers)
        return response
