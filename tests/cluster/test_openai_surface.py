"""Text, stops, bytes and bad input at the HTTP surface of a real 1P1D cluster."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from tests.cluster.harness import ONE_EACH, Body, Ring, ids_of, joined, stream, text_of
from tests.waiting import wait_until

CLUSTER = ONE_EACH
LETTERS = "A B C D E F G"
FRANCE = "The capital of France is"
LONG: dict[str, Any] = {
    "prompt": FRANCE,
    "max_tokens": 4000,
    "ignore_eos": True,
    "logit_bias": {"28589": 100},
}
streaming = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])


@streaming
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["K L P"], " H I "),
        (["L P Z"], " H I K L P Q R S T U\n\n"),
        (["H", "K"], " "),
        (["I"], " H "),
    ],
)
def test_stop_strings_across_tokens(ring: Ring, stop: list[str], text: str, streamed: bool) -> None:
    """vllm-project/vllm #3574: a stop string's beginning leaked into the stream."""
    answer = ring.complete(LETTERS, max_tokens=12, stop=stop, stream=streamed)
    assert text_of(answer) == text
    finished = "length" if stop == ["L P Z"] else "stop"
    assert answer["choices"][0]["finish_reason"] == finished


@pytest.mark.parametrize("max_tokens", [15, 16])
def test_characters_of_several_tokens_arrive_whole(ring: Ring, max_tokens: int) -> None:
    """turboderp-org/exllamav3 #171: emoji came as U+FFFD in streams."""
    body = {"prompt": "🤗" * 8, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    pieces = [e["choices"][0]["text"] for e in stream(ring.http, "/v1/completions", body)]
    whole = text_of(ring.complete("🤗" * 8, max_tokens=max_tokens))
    assert "".join(pieces) == whole
    assert whole.startswith("🤗" * 5)
    if max_tokens == 15:
        assert whole == "🤗" * 5
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_stop_string_of_emoji(ring: Ring) -> None:
    answer = ring.complete("🤗" * 8, max_tokens=15, stop=["🤗🤗"], stream=True)
    assert text_of(answer) == ""


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [""]},
        {"prompt": [[]]},
        {"prompt": [49152]},
        {"prompt": [-1]},
        {"prompt": FRANCE, "logit_bias": {"49152": 1}},
        {"prompt": FRANCE, "logit_bias": {"abc": 1}},
        {"prompt": FRANCE, "n": 1_000_000},
        {"prompt": FRANCE, "max_tokens": 10**12},
        {"prompt": FRANCE, "max_tokens": 0},
        {"prompt": FRANCE, "max_tokens": 3.5},
        {"prompt": FRANCE, "logprobs": 10**6},
        {"prompt": FRANCE, "temperature": "hot"},
        {"prompt": FRANCE, "stream_options": {"include_usage": True}},
        {"prompt": FRANCE, "best_of": 4},
    ],
)
def test_bad_input_is_a_400_and_harms_nobody(ring: Ring, body: Body) -> None:
    """vllm-project/vllm #7632: an empty prompt took the engine down for everyone."""
    response = ring.post("/v1/completions", body)
    assert response.status_code == 400, response.text
    assert len(response.content) < 10_000
    assert ids_of(ring.complete(FRANCE, max_tokens=2)) == [7042, 30]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1", '"x"'])
def test_numbers_that_are_none(ring: Ring, value: str) -> None:
    """raullenchai/Rapid-MLX PR#740: NaN slipped through, and the 400 became a 500."""
    raw = f'{{"prompt": "x", "temperature": {value}}}'
    headers = {"content-type": "application/json"}
    response = ring.http.post("/v1/completions", content=raw, headers=headers)
    assert response.status_code == 400
    json.loads(response.content, parse_constant=lambda name: pytest.fail(name))


@pytest.mark.parametrize("temperature", [1e-4, 1e-9])
def test_a_tiny_temperature_is_greedy(ring: Ring, temperature: float) -> None:
    answer = ring.complete(FRANCE, max_tokens=8, temperature=temperature)
    assert ids_of(answer) == [7042, 30, 198, 198, 504, 2988, 314, 42]


def test_impossible_logprobs_are_finite_numbers(ring: Ring) -> None:
    """sgl-project/sglang #4097: -inf could not be put in JSON."""
    body = {
        "prompt": FRANCE,
        "max_tokens": 2,
        "temperature": 0,
        "logprobs": 5,
        "top_k": 1,
        "logit_bias": {"7042": -100},
    }
    response = ring.post("/v1/completions", body)
    assert response.status_code == 200
    json.loads(response.content, parse_constant=lambda name: pytest.fail(name))


def test_the_chat_template_is_applied_once(ring: Ring) -> None:
    """vllm-project/vllm #9519: a second BOS in front of the template's."""
    answer = ring.chat("Hi", max_tokens=4)
    assert answer["usage"]["prompt_tokens"] == 31
    prompt_ids = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
    assert prompt_ids[:3] == [1, 9690, 198]


class Caller:
    """Asks for a very long answer, and hangs up when told to."""

    def __init__(self, base_url: str, stream: bool) -> None:
        address = httpx.URL(base_url)
        self._socket = socket.create_connection((address.host, address.port or 80))
        body = json.dumps({**LONG, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        self._request = head.encode() + b"Content-Type: application/json\r\n\r\n" + body

    def ask(self) -> None:
        self._socket.sendall(self._request)

    def hang_up(self) -> None:
        self._socket.close()


@pytest.mark.parametrize(
    ("num_callers", "stream"),
    [(1, True), (1, False), (24, False)],
    ids=["stream", "whole", "queue"],
)
def test_a_hang_up_stops_the_work_within_a_second(
    ring: Ring, num_callers: int, stream: bool
) -> None:
    """ggml-org/llama.cpp #24496: client gone, generation went on to max_tokens."""
    callers = [Caller(ring.base_url, stream) for _ in range(num_callers)]
    for caller in callers:
        caller.ask()

    def working() -> bool:
        coordinator = ring.cluster()["coordinator"]
        waiting = coordinator["num_requests_waiting"] > 0 or num_callers == 1
        return waiting and ring.total("decode", "num_requests_running") > 0

    wait_until(working, 20, "the work has begun")
    for caller in callers:
        caller.hang_up()
    wait_until(lambda: not ring.leftovers(), 1.0, "nothing runs for those who left")


def test_joined_streams_equal_whole_answers(ring: Ring) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "stream": True,
    }
    answer = joined(stream(ring.http, "/v1/chat/completions", body))
    assert text_of(answer) == "The capital of France is Paris."
