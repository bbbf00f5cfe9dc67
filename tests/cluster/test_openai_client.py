"""The `openai` package against a real cluster."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.cluster.harness import ONE_EACH, Ring

CLUSTER = ONE_EACH
FRANCE = "The capital of France is"
GREETING = "Hello! How can I assist you today?"


@pytest.fixture
def client(ring: Ring) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{ring.base_url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_models_lists_every_served_name(client: openai.OpenAI) -> None:
    assert {model.id for model in client.models.list()} == {"smol", "smollm2-135m"}


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="smol", prompt=FRANCE, max_tokens=8, temperature=0)
    assert answer.choices[0].text == " Paris.\n\nThe answer is:"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.total_tokens == 13


def test_completion_streamed(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="smol", prompt=FRANCE, max_tokens=8, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == " Paris.\n\nThe answer is:"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smol", messages=[{"role": "user", "content": "Hi"}], temperature=0
    )
    assert answer.choices[0].message.content == GREETING
    assert answer.choices[0].finish_reason == "stop"


def test_chat_streamed_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="smol",
        messages=[{"role": "user", "content": "Hi"}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == GREETING
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 10
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_two_choices(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="smol", prompt=FRANCE, n=2, max_tokens=6, temperature=0.8, seed=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None and answer.usage.completion_tokens == 12


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="smol", prompt=FRANCE, max_tokens=2, temperature=0, logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] == pytest.approx(-0.2581, abs=1e-3)
    chat = client.chat.completions.create(
        model="smol",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=2,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    content = chat.choices[0].logprobs
    assert content is not None and content.content is not None
    assert [len(entry.top_logprobs) for entry in content.content] == [2, 2]


def test_stop(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="smol", prompt="A B C D E F G", max_tokens=12, temperature=0, stop=["K L P"]
    )
    assert answer.choices[0].text == " H I "
    assert answer.choices[0].finish_reason == "stop"


def test_errors_come_as_the_openai_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nobody", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="smol", prompt="x", temperature=-1)
