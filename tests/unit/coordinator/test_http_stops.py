"""Where an answer ends: limits, EOS, stop strings, cut characters."""

from __future__ import annotations

import pytest

from tests.tiny_models import EOS_ID
from tests.unit.coordinator.calls import R3, Body, complete, last_prefill, script, wasted
from tests.unit.coordinator.running import RunningCoordinator
from tests.unit.coordinator.sse import streamed


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
