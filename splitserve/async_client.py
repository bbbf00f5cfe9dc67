"""The client that is awaited. See splitserve.client for the one that waits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Self, overload

import httpx

from splitserve.answers import Answer, answer_from, error_from
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
from splitserve.jobs import AsyncJob
from splitserve.request import SamplingParams
from splitserve.streams import AsyncStream, decoded, failure_of, http_options


class AsyncClient:
    """Owns a connection pool to one cluster, for use in one event loop. As Client."""

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        model: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._address = address_of(base_url, api_key)
        self._model = model
        self._http = httpx.AsyncClient(**http_options(self._address, timeout_s))

    @property
    def base_url(self) -> str:
        return self._address.base_url

    async def model(self) -> str:
        """The name of the served model; asked for once."""
        if self._model is None:
            self._model = (await self._json("GET", "/v1/models"))["data"][0]["id"]
        return self._model

    @overload
    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        **options: Any,
    ) -> Answer: ...

    @overload
    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        **options: Any,
    ) -> AsyncStream: ...

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        **options: Any,
    ) -> Answer | AsyncStream:
        """Continue a prompt: text, or token ids. With stream=True, for `async for`."""
        return await self._send(completion_call(prompt, params, stream, options), stream)

    @overload
    async def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        **options: Any,
    ) -> Answer: ...

    @overload
    async def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        **options: Any,
    ) -> AsyncStream: ...

    async def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        **options: Any,
    ) -> Answer | AsyncStream:
        """Answer a conversation: messages with role and content, or one text of the user."""
        return await self._send(chat_call(messages, params, stream, options), stream)

    def submit(
        self, prompts: Iterable[Prompt], *, concurrency: int = 32, **options: Any
    ) -> AsyncJob:
        """Start many prompts in the running loop, `concurrency` at a time; overload is retried."""
        return AsyncJob(self, list(prompts), concurrency, options)

    async def cluster(self) -> dict[str, Any]:
        """GET /cluster: targets, the coordinator, and the state of every worker."""
        return await self._json("GET", "/cluster")

    async def scale(self, *, prefill: int, decode: int) -> dict[str, Any]:
        """Set the wanted numbers of workers; returns at once, with the target."""
        return await self._json("POST", "/cluster/scale", {"prefill": prefill, "decode": decode})

    async def restart(self, pool: Role) -> dict[str, Any]:
        """Begin to replace the workers of a pool one by one; returns at once, with their ids."""
        return await self._json("POST", "/cluster/restart", {"pool": pool})

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _send(self, call: Call, stream: bool) -> Answer | AsyncStream:
        body = call.with_model(await self.model())
        request = self._http.build_request("POST", call.path, json=body, headers=call.headers)
        response = await self._exchange(request, stream)
        return AsyncStream(response) if stream else answer_from(decoded(response))

    async def _json(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        request = self._http.build_request(method, path, json=body)
        return decoded(await self._exchange(request, False))

    async def _exchange(self, request: httpx.Request, stream: bool) -> httpx.Response:
        try:
            response = await self._http.send(request, stream=stream)
            if response.is_error:
                await response.aread()
        except httpx.TransportError as error:
            raise failure_of(self._address, error) from error
        if response.is_error:
            await response.aclose()
            raise error_from(response.status_code, response.content, response.headers)
        return response
