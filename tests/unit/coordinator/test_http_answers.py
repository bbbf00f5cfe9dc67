"""Answers over real HTTP, from scripted workers over the real wire."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.tiny_models import EOS_ID
from tests.unit.coordinator.running import RunningCoordinator
from tests.unit.coordinator.scripted_worker import Script
from tests.unit.coordinator.sse import chunks_of, streamed

R3 = b" H I K L P Q R S T U\n\n"
Body = dict[str, Any]


def script(coordinator: RunningCoordinator, answer: bytes | None = None, **options: Any) -> Script:
    """Change what the workers do."""
    found = coordinator.workers[0].script
    if answer is not None:
        found.answer = lambda prefill, choice: answer
    for name, value in options.items():
        setattr(found, name, value)
    return found


def complete(coordinator: RunningCoordinator, **body: Any) -> Body:
    response = coordinator.http.post("/v1/completions", json={"prompt": "hi", **body})
    assert response.status_code == 200, response.text
    found: Body = response.json()
    return found


def chat(coordinator: RunningCoordinator, **body: Any) -> Body:
    messages = [{"role": "user", "content": "Hi"}]
    response = coordinator.http.post("/v1/chat/completions", json={"messages": messages, **body})
    assert response.status_code == 200, response.text
    found: Body = response.json()
    return found


def last_prefill(coordinator: RunningCoordinator) -> Any:
    return coordinator.workers[1].prefills[-1]


def wasted(coordinator: RunningCoordinator) -> int:
    return int(coordinator.cluster()["coordinator"]["num_wasted_tokens"])


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


# -- where an answer ends ------------------------------------------------------------------------


def test_one_token_is_one_token(coordinator: RunningCoordinator) -> None:
    """sgl-project/sglang#7147: the length rule was not applied to the first token."""
    body = complete(coordinator, max_tokens=1)
    assert body["choices"][0]["text"] == "a"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_eos_as_the_first_token(coordinator: RunningCoordinator, stream: bool) -> None:
    """sgl-project/sglang#12557: with EOS first the stream was never closed."""
    found = script(coordinator)
    found.answer = lambda prefill, choice: (EOS_ID,)  # type: ignore[assignment, return-value]
    if stream:
        result = streamed(coordinator, "/v1/completions", {"prompt": "x"})
        assert result.text(0) == "" and result.finish_reasons(0) == ["stop"]
    else:
        body = complete(coordinator)
        assert body["choices"][0]["text"] == ""
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == 1


def test_eos_ignored(coordinator: RunningCoordinator) -> None:
    found = script(coordinator)
    found.answer = lambda p, c: (EOS_ID, 97)  # type: ignore[assignment, return-value]
    body = complete(coordinator, ignore_eos=True, max_tokens=4, return_token_ids=True)
    assert body["choices"][0]["token_ids"] == [EOS_ID, 97, EOS_ID, 97]
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("options", "text", "num_tokens"),
    [
        ({"stop": [" H"]}, "", 2),
        ({"stop": "K"}, " H I ", 6),
        ({"stop_token_ids": [ord("K")]}, " H I ", 6),
        ({"stop": ["K L P"]}, " H I ", 10),
        ({"stop": ["U\n\n"]}, " H I K L P Q R S T ", 22),
    ],
)
def test_stops_across_the_hand_off(
    coordinator: RunningCoordinator, options: Body, text: str, num_tokens: int
) -> None:
    """NVIDIA/TensorRT-LLM#16691: stop rules missed the token that was handed over."""
    script(coordinator, R3)
    body = complete(coordinator, max_tokens=100, **options)
    assert body["choices"][0]["text"] == text
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == num_tokens


def test_a_stop_string_frees_the_workers_and_counts_the_waste(
    coordinator: RunningCoordinator,
) -> None:
    script(coordinator, b"abcdefgh", tokens_per_row=50)
    decode = coordinator.workers[0]
    num_sent, num_wasted = decode.num_tokens_sent, wasted(coordinator)
    body = complete(coordinator, max_tokens=400, stop="cd")
    assert body["usage"]["completion_tokens"] == 4
    request_id = last_prefill(coordinator).request_id
    coordinator.wait(
        lambda: request_id in [release.request_id for release in decode.releases],
        "the decode worker is told",
    )
    coordinator.check_at_rest()
    assert wasted(coordinator) - num_wasted == decode.num_tokens_sent - num_sent - 3


def test_no_chunk_begins_a_stop_string(coordinator: RunningCoordinator) -> None:
    script(coordinator, R3)
    asked = {"prompt": "x", "stop": ["K L P"], "max_tokens": 30}
    result = streamed(coordinator, "/v1/completions", asked)
    assert not any("K" in text for text in result.texts(0))
    assert all(result.texts(0)[:-1]), "no empty chunks"


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 18, 20])
@pytest.mark.parametrize("tokens_per_row", [1, 3])
def test_characters_in_parts(
    coordinator: RunningCoordinator, num_tokens: int, tokens_per_row: int
) -> None:
    script(coordinator, "🤗".encode(), tokens_per_row=tokens_per_row)
    text = complete(coordinator, max_tokens=num_tokens)["choices"][0]["text"]
    assert text == ("🤗".encode() * 9)[:num_tokens].decode(errors="replace")
    result = streamed(coordinator, "/v1/completions", {"prompt": "x", "max_tokens": num_tokens})
    assert result.text(0) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in result.texts(0)[:-1])


# -- several answers -----------------------------------------------------------------------------


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


# -- what comes with an answer -------------------------------------------------------------------


def test_logprobs_of_a_completion(coordinator: RunningCoordinator) -> None:
    body = complete(coordinator, logprobs=3, max_tokens=4)
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "d"]
    assert logprobs["token_logprobs"] == [-0.25] * 4
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert [len(top) for top in logprobs["top_logprobs"]] == [3] * 4
    assert logprobs["top_logprobs"][0]["a"] == -0.25


def test_logprobs_of_a_chat(coordinator: RunningCoordinator) -> None:
    body = chat(coordinator, logprobs=True, top_logprobs=2, max_tokens=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "b"]
    assert content[0]["bytes"] == [97] and content[0]["logprob"] == -0.25
    assert [entry["token"] for entry in content[1]["top_logprobs"]] == ["b", "a"]
    assert content[1]["top_logprobs"][1]["logprob"] == -9999.0, "finite: JSON has no -inf"
    body = chat(coordinator, logprobs=True, max_tokens=2)
    assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_tokens_of_one_text_are_told_apart(coordinator: RunningCoordinator) -> None:
    """Parts of characters all read U+FFFD."""
    script(coordinator, bytes([200]))
    top = complete(coordinator, logprobs=1, max_tokens=1)["choices"][0]["logprobs"]
    assert top["tokens"] == ["\N{REPLACEMENT CHARACTER}"] and len(top["top_logprobs"][0]) == 1


def test_echo(coordinator: RunningCoordinator) -> None:
    body = complete(coordinator, prompt=["hi ", "yo "], echo=True, n=2, max_tokens=2)
    assert [c["text"] for c in body["choices"]] == ["hi ab", "hi ab", "yo ab", "yo ab"]
    assert body["usage"]["completion_tokens"] == 8
    assert complete(coordinator, prompt=[104, 105], echo=True, max_tokens=1)["choices"][0][
        "text"
    ].startswith("hi")
    asked = {"prompt": "hi ", "echo": True, "max_tokens": 2}
    assert streamed(coordinator, "/v1/completions", asked).text(0) == "hi ab"


@pytest.mark.parametrize("stream", [False, True])
def test_timing(coordinator: RunningCoordinator, stream: bool) -> None:
    asked: Body = {"prompt": "hi", "max_tokens": 3, "return_timing": True}
    if stream:
        timing = streamed(coordinator, "/v1/completions", asked).timing
    else:
        timing = complete(coordinator, **asked)["timing"]
    decode, prefill = coordinator.workers
    assert timing["prefill_worker_id"] == prefill.worker_id
    assert timing["decode_worker_id"] == decode.worker_id
    assert timing["num_kv_bytes"] == 2 * 1024 and timing["transfer_s"] == 0.003
    assert timing["prefill_s"] == 0.002
    assert 0 < timing["ttft_s"] < timing["e2e_s"] and timing["handoff_gap_s"] > 0


def test_timing_of_several_prompts_is_a_list(coordinator: RunningCoordinator) -> None:
    timing = complete(coordinator, prompt=["a", "b"], return_timing=True)["timing"]
    assert len(timing) == 2 and all(one["ttft_s"] > 0 for one in timing)


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
def test_usage_in_a_stream_only_when_asked_for(
    coordinator: RunningCoordinator, options: Body | None
) -> None:
    """raullenchai/Rapid-MLX#792: usage nobody asked for, or with choices in its chunk."""
    asked: Body = {"prompt": "hi", "max_tokens": 1, "stream": True, "stream_options": options}
    with coordinator.http.stream("POST", "/v1/completions", json=asked) as response:
        chunks = chunks_of(response)
    with_usage = [chunk for chunk in chunks if chunk.get("usage")]
    if options == {"include_usage": True}:
        assert with_usage == [chunks[-1]] and chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["total_tokens"] == 3
    else:
        assert with_usage == [] and all(chunk["choices"] for chunk in chunks)


def test_the_label_of_a_request_comes_back(coordinator: RunningCoordinator) -> None:
    headers = {"x-request-id": "mine"}
    answers = [
        coordinator.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        for _ in range(2)
    ]
    assert [answer.headers["x-request-id"] for answer in answers] == ["mine", "mine"]
    internal = {p.request_id for p in coordinator.workers[1].prefills[-2:]}
    assert len(internal) == 2 and "mine" not in internal
    assert coordinator.http.get("/live").headers["x-request-id"]


# -- defaults ------------------------------------------------------------------------------------


def test_defaults_of_a_completion(coordinator: RunningCoordinator) -> None:
    complete(coordinator)
    sampling = last_prefill(coordinator).sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (16, 1.0, 1.0)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (0, 0.0, 1.0)
    assert sampling.logprobs is None and sampling.eos_token_ids == (EOS_ID,)


@pytest.mark.parametrize(
    ("options", "max_tokens"),
    [
        ({}, None),
        ({"max_tokens": None}, None),
        ({"max_completion_tokens": 3}, 3),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 3}, 3),
    ],
)
def test_max_tokens_of_a_chat(
    coordinator: RunningCoordinator, options: Body, max_tokens: int | None
) -> None:
    """vllm-project/production-stack#797: a missing limit became 0. None: the rest of the context."""
    script(coordinator, b"abc", tokens_per_row=100)
    body = chat(coordinator, **options)
    prompt_tokens = body["usage"]["prompt_tokens"]
    assert body["usage"]["completion_tokens"] == (max_tokens or 512 - prompt_tokens)


def test_sampling_arrives_as_asked(coordinator: RunningCoordinator) -> None:
    complete(
        coordinator,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.3,
        presence_penalty=1,
        frequency_penalty=-0.5,
        logit_bias={"7": 3, "9": -100},
        min_tokens=2,
        stop_token_ids=[5],
        logprobs=0,
    )
    sampling = last_prefill(coordinator).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 0)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.3)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -0.5)
    assert sampling.logit_bias == ((7, 3.0), (9, -100.0))
    assert (sampling.min_tokens, sampling.stop_token_ids, sampling.logprobs) == (2, (5,), 0)


@pytest.mark.parametrize(("asked", "used"), [(0, 0.0), (1e-9, 0.0), (1e-4, 1e-4), (None, 1.0)])
def test_temperatures(coordinator: RunningCoordinator, asked: Any, used: float) -> None:
    complete(coordinator, temperature=asked)
    assert last_prefill(coordinator).sampling.temperature == used


def test_a_long_text_is_tokenized_all_the_same(coordinator: RunningCoordinator) -> None:
    response = coordinator.http.post("/tokenize", json={"prompt": "é" * 5000})
    assert response.json()["count"] == 10000
    assert coordinator.http.post("/detokenize", json={"tokens": [104, 105]}).json() == {
        "prompt": "hi"
    }
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    parts = coordinator.http.post("/tokenize", json={"messages": messages}).json()
    assert parts["count"] == chat(coordinator, max_tokens=1)["usage"]["prompt_tokens"]


def test_answers_are_strict_json(coordinator: RunningCoordinator) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    response = coordinator.http.post("/v1/completions", json={"prompt": "x", "logprobs": 5})
    json.loads(response.text, parse_constant=refuse)
