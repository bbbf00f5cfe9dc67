"""Answers over real HTTP, from scripted workers over the real wire."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.coordinator.calls import R3, Body, chat, complete, last_prefill, script
from tests.unit.coordinator.running import RunningCoordinator
from tests.unit.coordinator.sse import streamed


def test_a_completion(coordinator: RunningCoordinator) -> None:
    body = complete(coordinator, max_tokens=10)
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["model"] == "tiny"
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "text": "abcdefghab",
        "logprobs": None,
        "finish_reason": "length",
    }
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 10,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert "timing" not in body


def test_a_chat_completion(coordinator: RunningCoordinator) -> None:
    body = chat(coordinator, max_tokens=4, return_token_ids=True)
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "abcd"
    assert choice["finish_reason"] == "length"
    assert choice["token_ids"] == list(b"abcd")
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    rendered = coordinator.http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
    assert body["prompt_token_ids"] == rendered == list(last_prefill(coordinator).token_ids)
    assert body["usage"]["prompt_tokens"] == len(rendered)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("tokens_per_row", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 3},
        {"stop": ["K L P"]},
        {"stop": ["L P Z"]},
        {"stop": ["H", "K"]},
        {"max_tokens": 1},
        {"max_tokens": 2, "logprobs": True},
        {"return_token_ids": True, "stop": "I"},
    ],
    ids=str,
)
def test_a_stream_says_what_one_piece_says(
    coordinator: RunningCoordinator, path: str, options: Body, tokens_per_row: int
) -> None:
    script(coordinator, R3, tokens_per_row=tokens_per_row)
    is_chat = path.endswith("chat/completions")
    asked = {"max_tokens": len(R3), **options}
    if not is_chat and "logprobs" in asked:
        asked["logprobs"] = 1
    asked |= {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "x"}
    whole = coordinator.http.post(path, json=asked).json()
    stream = streamed(coordinator, path, {**asked, "stream_options": {"include_usage": True}})
    assert stream.usage == whole["usage"]
    for choice in whole["choices"]:
        index = choice["index"]
        text = choice["message"]["content"] if is_chat else choice["text"]
        assert stream.text(index) == text
        assert stream.finish_reasons(index) == [choice["finish_reason"]]
        assert stream.token_ids(index) == choice.get("token_ids", [])
        logprobs = choice["logprobs"] and (
            choice["logprobs"]["content"] if is_chat else choice["logprobs"]["tokens"]
        )
        assert stream.logprobs(index, "content" if is_chat else "tokens") == (logprobs or [])
        assert stream.first_roles(index) == (["assistant"] if is_chat else [])


def test_choices_and_prompts_in_order(coordinator: RunningCoordinator) -> None:
    found = script(coordinator)
    found.answer = lambda p, c: f"{bytes(p.token_ids).decode()}{c.choice_id}".encode()
    body = complete(coordinator, prompt=["x", "yy", "zzz"], n=2, max_tokens=4)
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    texts = [choice["text"] for choice in body["choices"]]
    assert texts == ["x0x0", "x1x1", "yy0y", "yy1y", "zzz0", "zzz1"]
    assert body["usage"]["prompt_tokens"] == 6, "each prompt once"
    assert body["usage"]["completion_tokens"] == 24, "all choices"
    prefills = coordinator.workers[1].prefills[-3:]
    assert [p.num_prompt_tokens for p in prefills] == [1, 2, 3], "one prefill a prompt"
    assert len({p.request_id for p in prefills}) == 3


def test_all_choices_of_a_request_share_its_seed(coordinator: RunningCoordinator) -> None:
    complete(coordinator, n=3, seed=7)
    assert [(c.choice_id, c.seed) for c in last_prefill(coordinator).choices] == [
        (0, 7),
        (1, 7),
        (2, 7),
    ]


def test_without_a_seed_there_is_a_random_one(coordinator: RunningCoordinator) -> None:
    seeds = set()
    for _ in range(3):
        complete(coordinator)
        seeds.add(last_prefill(coordinator).choices[0].seed)
    assert len(seeds) == 3
    complete(coordinator, seed=-1)
    assert 0 <= last_prefill(coordinator).choices[0].seed < 2**63


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [("hi", [[104, 105]]), ([104, 105], [[104, 105]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_forms_of_prompts(
    coordinator: RunningCoordinator, prompt: Any, token_ids: list[list[int]]
) -> None:
    body = complete(coordinator, prompt=prompt, return_token_ids=True, max_tokens=1)
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == token_ids
