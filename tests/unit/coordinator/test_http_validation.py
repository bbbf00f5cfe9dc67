"""What can't be served is refused at once, by name, and disturbs nobody."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tiny_models import VOCAB_SIZE
from tests.unit.coordinator.refusals import (
    CHAT,
    COMPLETIONS,
    HI,
    Body,
    error_of,
    post,
)
from tests.unit.coordinator.running import RunningCoordinator

BOTH = [
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"temperature": -1},
    {"temperature": 1e9},
    {"temperature": "0.7"},
    {"temperature": True},
    {"top_p": 0},
    {"top_p": 1.5},
    {"top_k": 1.5},
    {"top_k": -2},
    {"min_p": 2},
    {"repetition_penalty": 0},
    {"repetition_penalty": 1e-300},
    {"repetition_penalty": 101},
    {"presence_penalty": 3},
    {"presence_penalty": -2.1},
    {"frequency_penalty": 2.1},
    {"frequency_penalty": "x"},
    {"n": 0},
    {"n": 10**6},
    {"n": 2.0},
    {"n": "2"},
    {"n": True},
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": 10**12},
    {"max_tokens": 2**63},
    {"max_tokens": 3.5},
    {"max_tokens": "3"},
    {"min_tokens": -1},
    {"min_tokens": 20, "max_tokens": 10},
    {"seed": 2**63},
    {"seed": 1.5},
    {"stop": ""},
    {"stop": [""]},
    {"stop": ["x" * 10_000]},
    {"stop": ["x"] * 17},
    {"stop": [1]},
    {"stop": {"a": 1}},
    {"stop": "\ud83e"},
    {"stop_token_ids": [VOCAB_SIZE]},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": ["a"]},
    {"logit_bias": {str(VOCAB_SIZE): 1}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"1e9": 1}},
    {"logit_bias": {"abc": 1}},
    {"logit_bias": {"٣": 1}},
    {"logit_bias": {"5": "x"}},
    {"logit_bias": {"5": float("nan")}},
    {"logit_bias": {"5": float("inf")}},
    {"logit_bias": {"5": 101}},
    {"logit_bias": {str(i % 250): 1 for i in range(250)} | {f"{i:04}": 1 for i in range(50)}},
    {"logit_bias": [1]},
    {"ignore_eos": "yes"},
    {"priority": "high"},
    {"stream": "true"},
    {"stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"include_usage": "yes"}},
    {"tools": [{"type": "function"}]},
    {"response_format": {"type": "json_object"}},
    {"guided_json": {"type": "object"}},
    {"best_of": 3},
    {"prompt_logprobs": 1},
    {"skip_special_tokens": False},
    {"allowed_token_ids": [1]},
    {"model": 7},
    {"return_token_ids": 1},
]


@pytest.mark.parametrize("options", BOTH, ids=lambda options: repr(options)[:60])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_bad_values(coordinator: RunningCoordinator, path: str, options: Body) -> None:
    prompt = {"prompt": "hi"} if path == COMPLETIONS else {"messages": HI}
    error = error_of(post(coordinator, path, {**prompt, **options}))
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", ["temperature", "n", "stop", "logit_bias", "tools", "best_of"])
def test_the_field_is_named(coordinator: RunningCoordinator, name: str) -> None:
    bad = {"temperature": -1, "n": 0, "stop": "", "logit_bias": {"x": 1}, "tools": [1]}
    body = {"prompt": "hi", name: bad.get(name, 9)}
    error = error_of(post(coordinator, COMPLETIONS, body))
    assert error["param"] == name and name in error["message"]


@pytest.mark.parametrize("stop", ["", [""], [1], 7, ["x"] * 17, "x" * 2000], ids=repr)
def test_a_bad_stop_is_explained_in_plain_words(coordinator: RunningCoordinator, stop: Any) -> None:
    error = error_of(post(coordinator, COMPLETIONS, {"prompt": "hi", "stop": stop}))
    assert error["param"] == "stop"
    assert "1 to 1024 characters" in error["message"] and "constrained" not in error["message"]


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        "",
        [],
        [""],
        [[]],
        ["a", ""],
        [[1], []],
        7,
        {"a": 1},
        [1.5],
        [True],
        ["a", 1],
        [[1], "a"],
        [[1, "a"]],
        [VOCAB_SIZE],
        [-1],
        [[1], [VOCAB_SIZE]],
        [2**70],
        "\ud83e",
        ["a"] * 65,
    ],
    ids=lambda prompt: repr(prompt)[:40],
)
def test_bad_prompts(coordinator: RunningCoordinator, prompt: Any) -> None:
    """vllm-project/vllm#7632: an empty prompt took the engine down for everyone."""
    assert error_of(post(coordinator, COMPLETIONS, {"prompt": prompt}))["param"] == "prompt"


def test_no_prompt(coordinator: RunningCoordinator) -> None:
    error_of(post(coordinator, COMPLETIONS, {}))


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        [1],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": "\ud83e"}],
        [{"role": "robot", "content": "hi"}],
        [{"role": ["user"], "content": "hi"}],
        [{"content": "hi"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": ["hi"]}],
        [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
        ["wrong"] * 10_000,
    ],
    ids=lambda messages: repr(messages)[:60],
)
def test_bad_messages(coordinator: RunningCoordinator, messages: Any) -> None:
    """vllm-project/vllm#49239: one error a message, each with the whole input in it."""
    assert error_of(post(coordinator, CHAT, {"messages": messages}))["param"] == "messages"


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 21},
        {"logprobs": -1},
        {"logprobs": True},
        {"echo": True, "logprobs": 1},
        {"echo": True, "max_tokens": 0},
        {"suffix": "x"},
        {"best_of": 2, "n": 1},
    ],
    ids=str,
)
def test_bad_values_of_completions(coordinator: RunningCoordinator, options: Body) -> None:
    error_of(post(coordinator, COMPLETIONS, {"prompt": "hi", **options}))


@pytest.mark.parametrize(
    "options",
    [
        *({"logprobs": True, "top_logprobs": k} for k in (21, 49153, 10**6, -1, True, 1.5)),
        {"top_logprobs": 1},
        {"logprobs": 1},
        {"functions": [{"name": "f"}]},
        {"modalities": ["audio"]},
        {"max_completion_tokens": 0},
    ],
    ids=str,
)
def test_bad_values_of_chat(coordinator: RunningCoordinator, options: Body) -> None:
    """sgl-project/sglang#40076: one request for too many logprobs killed the scheduler."""
    error_of(post(coordinator, CHAT, {"messages": HI, **options}))


def test_an_unknown_model(coordinator: RunningCoordinator) -> None:
    for path in (COMPLETIONS, CHAT):
        error = error_of(post(coordinator, path, {"model": "gpt-9", "prompt": "x"}), 404)
        assert error["code"] == "model_not_found" and "gpt-9" in error["message"]
    assert coordinator.http.get("/v1/models/gpt-9").status_code == 404
    assert coordinator.http.get("/v1/models/tiny").json()["max_model_len"] == 512


def test_harmless_and_unknown_fields(coordinator: RunningCoordinator) -> None:
    """vllm-project/vllm#47843: a client's internal fields are only unknown words here."""
    body = {
        "prompt": "hi",
        "max_tokens": 3,
        "model": "tiny",
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "best_of": 1,
        "kv_transfer_params": {"remote_host": "10.0.0.1", "remote_port": 1},
        "decode_endpoint": "tcp://10.0.0.1:1",
        "no_such_thing": [1, 2],
    }
    assert coordinator.http.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == "abc"
    prefill = coordinator.workers[1].prefills[-1]
    assert prefill.decode_worker_id == coordinator.workers[0].worker_id
    assert prefill.decode_endpoint == "tcp://127.0.0.1:9"


@pytest.mark.parametrize("options", [{"stop": None}, {"stop": []}, {"stop": "\n"}, {"stop": "zzz"}])
def test_stops_that_are_fine(coordinator: RunningCoordinator, options: Body) -> None:
    body = {"prompt": "hi", "max_tokens": 3, **options}
    assert coordinator.http.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == "abc"


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "status"),
    [
        (511, None, 200),
        (511, 1, 200),
        (511, 2, 400),
        (512, None, 400),
        (513, 1, 400),
        (2000, 1, 400),
        (500, 12, 200),
        (500, 13, 400),
    ],
)
def test_the_context_has_an_end(
    coordinator: RunningCoordinator, num_tokens: int, max_tokens: int | None, status: int
) -> None:
    """vllm-project/vllm#39734: what can never fit was accepted and waited for ever."""
    body = {"prompt": [7] * num_tokens, "max_tokens": max_tokens}
    response = post(coordinator, COMPLETIONS, body)
    if status == 400:
        error = error_of(response)
        assert error["code"] == "context_length_exceeded"
        assert "511" in error["message"] or "512" in error["message"], "the true limit"
        assert str(num_tokens) in error["message"]
    else:
        usage = response.json()["usage"]
        assert usage["completion_tokens"] == max_tokens or num_tokens == 511


def test_a_text_that_can_not_fit_is_not_even_tokenized(coordinator: RunningCoordinator) -> None:
    error_of(post(coordinator, COMPLETIONS, {"prompt": "x" * 1_000_000}))
    error_of(post(coordinator, CHAT, {"messages": [{"role": "user", "content": "x" * 10**6}]}))
