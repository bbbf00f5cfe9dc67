from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from splitserve import AsyncClient, Client, SamplingParams
from splitserve.errors import (
    ConfigError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    RequestFailedError,
    SplitserveError,
    StreamBrokenError,
    UnavailableError,
)
from tests.unit.scripted_server import Exchange, ScriptedServer, scripted_server


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as scripted:
        yield scripted


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[Client]:
    with Client(server.base_url) as connected:
        yield connected


def test_generate_gives_text_reason_and_usage(client: Client, server: ScriptedServer) -> None:
    answer = client.generate("to be or", max_tokens=3, temperature=0.0)
    assert (answer.text, answer.finish_reason, answer.token_ids) == ("to be or", "length", None)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert server.exchanges[0].body == {
        "model": "tiny",
        "prompt": "to be or",
        "max_tokens": 3,
        "temperature": 0.0,
    }


def test_params_are_sent_whole_and_options_win(client: Client, server: ScriptedServer) -> None:
    params = SamplingParams(max_tokens=5, stop=("x",), logit_bias={7: -100.0}, temperature=0.0)
    client.generate([1, 2], params, max_tokens=6, x_request_id="mine")
    exchange = server.exchanges[0]
    assert exchange.headers["x-request-id"] == "mine"
    assert exchange.body["prompt"] == [1, 2]
    assert exchange.body["max_tokens"] == 6
    assert exchange.body["stop"] == ["x"]
    assert exchange.body["logit_bias"] == {"7": -100.0}
    assert exchange.body["temperature"] == 0.0
    assert "seed" not in exchange.body


def test_misspelt_option_is_a_type_error(client: Client, server: ScriptedServer) -> None:
    with pytest.raises(TypeError, match="'max_token'"):
        client.generate("x", max_token=3)
    assert server.exchanges == []


def test_stream_gives_chunks_then_usage_and_timing(client: Client, server: ScriptedServer) -> None:
    chunks = list(client.generate("to be or", stream=True))
    assert [chunk.text for chunk in chunks] == ["to", "be", "or", ""]
    assert chunks[0].token_ids == (1,)
    assert chunks[-1].usage is not None
    assert chunks[-1].timing == {"ttft_s": 0.1}
    assert server.exchanges[0].body["stream_options"] == {"include_usage": True}


def test_chat_takes_messages_or_a_text(client: Client, server: ScriptedServer) -> None:
    def chat(exchange: Exchange) -> None:
        message = {"role": "assistant", "content": "hello"}
        choices = [{"index": i, "message": message, "finish_reason": "stop"} for i in (1, 0)]
        exchange.json({"choices": choices})

    server.handler = chat
    answer = client.chat("Hi", logprobs=2, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.text == "hello"
    assert server.exchanges[0].path == "/v1/chat/completions"
    assert server.exchanges[0].body["messages"] == [{"role": "user", "content": "Hi"}]
    assert (server.exchanges[0].body["logprobs"], server.exchanges[0].body["top_logprobs"]) == (
        True,
        2,
    )


def cut_off(exchange: Exchange) -> None:
    exchange.start_stream()
    exchange.event({"choices": [{"index": 0, "text": "half"}]})
    exchange.http.close_connection = True


def end_without_marker(exchange: Exchange) -> None:
    exchange.start_stream()
    exchange.event({"choices": [{"index": 0, "text": "half"}]})
    exchange.end()


def error_event(exchange: Exchange) -> None:
    exchange.start_stream()
    exchange.event({"choices": [{"index": 0, "text": "half"}]})
    exchange.event({"error": {"message": "decode worker died", "type": "server_error"}})
    exchange.end()


def not_json(exchange: Exchange) -> None:
    exchange.start_stream()
    exchange.event({"choices": [{"index": 0, "text": "half"}]})
    exchange.event("{half an eve")
    exchange.end()


@pytest.mark.parametrize(
    ("handler", "kind", "message"),
    [
        (cut_off, StreamBrokenError, "not complete"),
        (end_without_marker, StreamBrokenError, "without the end marker"),
        (error_event, RequestFailedError, "decode worker died"),
        (not_json, StreamBrokenError, "not JSON"),
    ],
)
def test_broken_stream_raises_after_what_was_good(
    client: Client, server: ScriptedServer, handler: Any, kind: type[Exception], message: str
) -> None:
    server.handler = handler
    received = []

    def read() -> None:
        for chunk in client.generate("x", stream=True):
            received.append(chunk.text)

    with pytest.raises(kind, match=message):
        read()
    assert received == ["half"]

    async def read_async() -> None:
        async with AsyncClient(server.base_url) as other:
            async for chunk in await other.generate("x", stream=True):
                received.append(chunk.text)

    with pytest.raises(kind, match=message):
        asyncio.run(read_async())
    assert received == ["half", "half"]


def test_line_separators_inside_text_do_not_end_an_event(
    client: Client, server: ScriptedServer
) -> None:
    text = "a\u2028b\x85c\x0bd"

    def stream(exchange: Exchange) -> None:
        exchange.start_stream()
        event = f'data: {{"choices": [{{"index": 0, "text": "{text[:-2]}"}}]}}\r\n\r\n'.encode()
        for start in range(len(event)):
            exchange.chunk(event[start : start + 1])
        exchange.event("[DONE]")
        exchange.end()

    server.handler = stream
    (chunk,) = client.generate("x", stream=True)
    assert chunk.text == text[:-2]


def test_closing_a_stream_hangs_up(client: Client, server: ScriptedServer) -> None:
    hung_up = threading.Event()

    def endless(exchange: Exchange) -> None:
        exchange.start_stream()
        exchange.event({"choices": [{"index": 0, "text": "a"}]})
        if exchange.wait_for_hang_up():
            hung_up.set()

    server.handler = endless
    with client.generate("x", stream=True) as stream:
        assert next(stream).text == "a"
    assert hung_up.wait(5)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, None, InvalidRequestError),
        (401, "invalid_api_key", InvalidRequestError),
        (404, "model_not_found", ModelNotFoundError),
        (404, None, InvalidRequestError),
        (429, None, OverloadedError),
        (500, None, RequestFailedError),
        (503, None, UnavailableError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_statuses_become_exceptions(
    client: Client, server: ScriptedServer, status: int, code: str | None, kind: Any, stream: bool
) -> None:
    def refuse(exchange: Exchange) -> None:
        error = {"message": "max_tokens is above 8192", "code": code, "param": "max_tokens"}
        exchange.json({"error": error}, status, {"retry-after": "7"})

    server.handler = refuse
    with pytest.raises(kind, match="above 8192") as raised:
        _ = client.generate("x", stream=True) if stream else client.generate("x")
    if kind is OverloadedError:
        assert raised.value.retry_after_s == 7.0
    if kind is InvalidRequestError:
        assert (raised.value.param, raised.value.status) == ("max_tokens", status)


def test_an_error_that_is_no_json_is_shown(client: Client, server: ScriptedServer) -> None:
    def page(exchange: Exchange) -> None:
        exchange.json("bad gateway page", 502)

    server.handler = page
    with pytest.raises(RequestFailedError, match=r"HTTP 502: .*bad gateway"):
        client.generate("x")


def test_nobody_there_is_unavailable() -> None:
    with (
        Client("http://127.0.0.1:9") as client,
        pytest.raises(UnavailableError, match=r"127\.0\.0\.1:9"),
    ):
        client.cluster()


def test_slow_server_is_a_failure_not_a_hang(server: ScriptedServer) -> None:
    server.handler = lambda exchange: exchange.stay_silent(1.0)
    with Client(server.base_url, timeout_s=0.2, model="tiny") as client:
        with pytest.raises(SplitserveError):
            client.generate("x")


def test_key_and_url_come_from_the_environment(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITSERVE_BASE_URL", server.base_url + "/v1/")
    monkeypatch.setenv("SPLITSERVE_API_KEY", "first,second")
    with Client() as client:
        assert client.base_url == server.base_url
        client.generate("x")
    assert server.exchanges[0].headers["authorization"] == "Bearer first"
    with pytest.raises(ConfigError, match="must start with http"):
        Client("localhost:8000")


def test_cluster_and_scale(client: Client, server: ScriptedServer) -> None:
    server.handler = lambda exchange: exchange.json({"path": exchange.path, "body": exchange.body})
    assert client.cluster() == {"path": "/cluster", "body": None}
    body = {"prefill": 1, "decode": 3}
    assert client.scale(prefill=1, decode=3) == {"path": "/cluster/scale", "body": body}
    asked = {"path": "/cluster/restart", "body": {"pool": "decode"}}
    assert client.restart("decode") == asked


def test_async_client_and_job(server: ScriptedServer) -> None:
    async def main() -> None:
        async with AsyncClient(server.base_url) as client:
            assert (await client.generate("to be")).text == "to be"
            stream = await client.generate("to be", stream=True)
            assert [chunk.text async for chunk in stream] == ["to", "be", ""]
            job = client.submit(["a", "b", "c"], concurrency=2)
            assert [answer.text async for answer in job.results()] == ["a", "b", "c"]
            assert job.status == "done"
            with pytest.raises(ValueError, match="concurrency"):
                client.submit(["a"], concurrency=0)
            server.handler = lambda exchange: exchange.json({})
            assert await client.cluster() == {}
            assert await client.scale(prefill=1, decode=1) == {}
            assert await client.restart("prefill") == {}

    asyncio.run(main())
