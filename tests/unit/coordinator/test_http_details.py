"""What comes with an answer, and what a request means that says little."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import EOS_ID, make_tiny_llama
from tests.unit.coordinator.calls import Body, chat, complete, last_prefill, script
from tests.unit.coordinator.refusals import CHAT, COMPLETIONS, error_of, post
from tests.unit.coordinator.running import RunningCoordinator, running
from tests.unit.coordinator.sse import chunks_of, streamed


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
    assert timing["num_kv_bytes"] == 2 * 1024 and timing["kv_transfer_s"] == 0.005
    assert timing["prefill_s"] == 0.002
    assert timing["decode_wait_s"] == 0.004 and timing["first_step_s"] == 0.002
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
    """vllm-project/production-stack#797: a missing limit became 0.

    None: what the context leaves."""
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


def test_a_tokenizer_that_knows_more_than_the_model_is_found_out(tmp_path: Path) -> None:
    """Tokens are often added to a tokenizer and not to the model's embedding."""
    model = make_tiny_llama(tmp_path, vocab_size=EOS_ID + 1)  # without the turns of a chat
    with running(model) as coordinator:
        asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        error = error_of(post(coordinator, CHAT, asked))
        assert error["param"] == "messages" and f"0 to {EOS_ID}, the vocabulary" in error["message"]
        asked = {"prompt": "<|im_start|>", "max_tokens": 1}
        error = error_of(post(coordinator, COMPLETIONS, asked))
        assert error["param"] == "prompt" and f"0 to {EOS_ID}, the vocabulary" in error["message"]
