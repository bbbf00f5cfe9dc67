from __future__ import annotations

import json
from typing import Any

import pytest

from splitserve.bench.outcome import looks_whole, outcome_of
from splitserve.bench_http import RawReply

PLAIN = {"choices": [{"index": 0, "text": "x"}]}
SILENT = {"choices": [{"index": 0, "text": ""}]}


def raw(*events: tuple[float, Any]) -> RawReply:
    reply = RawReply(200, sent_at=10.0)
    for at, event in events:
        text = event if isinstance(event, str) else json.dumps(event)
        reply.parts.append((at, f"data: {text}\n\n".encode()))
    return reply


def chunk(*ids: int) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "x", "token_ids": list(ids)}]}


def usage(number: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": number}}


def test_chunks_of_several_tokens_count_each() -> None:
    reply = raw((11, chunk(1)), (12, chunk(2, 3)), (13, chunk()), (13, usage(3)), (13, "[DONE]"))
    outcome = outcome_of(reply, 3)
    assert outcome.token_times_s == (1.0, 2.0, 2.0)
    assert outcome.num_hidden == 0


def test_a_token_whose_text_is_held_back_counts_when_ids_are_told() -> None:
    held = {"choices": [{"index": 0, "text": "", "token_ids": [7]}]}
    reply = raw((11, held), (12, chunk(2)), (13, usage(2)), (13, "[DONE]"))
    assert outcome_of(reply, 2).token_times_s == (1.0, 2.0)


def test_tokens_that_only_usage_tells_of_are_counted_and_known_to_be() -> None:
    reply = raw((11, PLAIN), (11.5, SILENT), (12, PLAIN), (13, usage(3)), (13, "[DONE]"))
    outcome = outcome_of(reply, 3)
    assert (outcome.token_times_s, outcome.num_hidden) == ((1.0, 2.0, 2.0), 1)


@pytest.mark.parametrize(
    ("details", "num_cached"),
    [({"cached_tokens": 12}, 12), ({"cached_tokens": None}, 0), (None, 0)],
)
def test_usage_may_tell_of_a_cache(details: Any, num_cached: int) -> None:
    told = usage(1)
    told["usage"]["prompt_tokens_details"] = details
    assert outcome_of(raw((11, chunk(1)), (11, told), (11, "[DONE]"))).num_cached == num_cached


def test_without_usage_chunks_are_all_there_is() -> None:
    reply = raw((11, PLAIN), (12, PLAIN), (13, "[DONE]"))
    assert outcome_of(reply).token_times_s == (1.0, 2.0)
    assert outcome_of(reply, 2).error is None


@pytest.mark.parametrize(
    ("events", "cause"),
    [
        ([chunk(1), chunk(2), usage(3)], "usage counts 3 tokens, its chunks held 2"),
        ([chunk(1, 2), usage(1)], "usage counts 1 tokens, its chunks held 2"),
        ([PLAIN, PLAIN, usage(1)], "usage counts 1 tokens, its chunks held 2"),
        ([chunk(1), usage(1)], "2 tokens were asked for, 1 came"),
        ([chunk(1, 2, 3), usage(3)], "2 tokens were asked for, 3 came"),
        ([PLAIN], "2 tokens were asked for, 1 came"),
        ([usage(2)], "an answer without tokens"),
    ],
)
def test_counts_that_do_not_agree_are_errors(events: list[Any], cause: str) -> None:
    outcome = outcome_of(raw(*((11, event) for event in (*events, "[DONE]"))), 2)
    assert outcome.error is not None and cause in outcome.error
    assert outcome.token_times_s == ()


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        ({"error": {"message": "worker died"}}, "error event: worker died"),
        ({"error": "worker died"}, "error event: worker died"),
        ("no JSON", "an event that can't be read"),
        ([1], "an event that can't be read"),
        ({"usage": {}, "choices": [{"text": "x", "token_ids": 3}]}, "an event that can't be read"),
    ],
)
def test_events_of_a_server_that_fails(event: Any, cause: str) -> None:
    outcome = outcome_of(raw((11, chunk(1)), (12, event), (12, "[DONE]")))
    assert outcome.error is not None and cause in outcome.error


def test_a_failure_is_plain_to_see_before_the_reply_is_read() -> None:
    assert looks_whole(raw((11, chunk(1)), (12, usage(1)), (12, "[DONE]")))
    assert not looks_whole(raw((11, chunk(1))))
    assert not looks_whole(raw((11, {"error": {"message": "lost"}}), (11, "[DONE]")))
    assert not looks_whole(RawReply(429, 10.0))
    assert not looks_whole("can't reach it")
