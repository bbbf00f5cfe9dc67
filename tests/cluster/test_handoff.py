"""The first token, the limits and the sampling state, across the hand-off (1P1D)."""

from __future__ import annotations

import pytest

from tests.cluster.harness import ONE_EACH, Body, Ring, ids_of, text_of

CLUSTER = ONE_EACH
FRANCE = "The capital of France is"
FRANCE_IDS = [7042, 30, 198, 198, 504, 2988, 314, 42]
GREETED = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    "Hello! How can I assist you today?"
)
streaming = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def finish_of(body: Body) -> str:
    reason: str = body["choices"][0]["finish_reason"]
    return reason


@streaming
@pytest.mark.parametrize("max_tokens", [1, 2])
def test_max_tokens_counts_the_first_token(ring: Ring, stream: bool, max_tokens: int) -> None:
    """sgl-project/sglang PR#7147: a request for one token returned two."""
    options: Body = {"stream": stream}
    if stream:
        options["stream_options"] = {"include_usage": True}
    before = ring.total("decode", "num_tokens_decoded")
    answer = ring.complete(FRANCE, max_tokens=max_tokens, **options)
    assert ids_of(answer) == FRANCE_IDS[:max_tokens]
    assert finish_of(answer) == "length"
    assert answer["usage"]["completion_tokens"] == max_tokens
    ring.assert_drained()
    assert ring.total("decode", "num_tokens_decoded") - before == max_tokens - 1


def test_one_token_moves_no_kv(ring: Ring) -> None:
    before = ring.total("decode", "num_kv_bytes_received")
    ring.complete(FRANCE, max_tokens=1)
    ring.assert_drained()
    assert ring.total("decode", "num_kv_bytes_received") == before


@streaming
def test_an_ignored_eos_as_first_token_goes_on(ring: Ring, stream: bool) -> None:
    """sgl-project/sglang PR#12557: the stream was never closed."""
    answer = ring.complete(GREETED, max_tokens=6, ignore_eos=True, stream=stream)
    assert ids_of(answer) == [2, 198, 1, 4093, 198, 57]
    assert finish_of(answer) == "length"


@streaming
def test_eos_as_first_token_is_an_empty_answer(ring: Ring, stream: bool) -> None:
    answer = ring.complete(GREETED, max_tokens=6, stream=stream)
    assert (text_of(answer), finish_of(answer)) == ("", "stop")


@streaming
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stop": [" Paris"]}, ""),
        ({"stop_token_ids": [7042]}, ""),
        ({"stop": ["Paris."]}, " "),
        ({"logit_bias": {"2": 100}}, ""),
    ],
)
def test_stop_rules_see_the_handed_over_token(
    ring: Ring, options: Body, text: str, stream: bool
) -> None:
    """NVIDIA/TensorRT-LLM PR#16691: stop words were not applied to it."""
    answer = ring.complete(FRANCE, max_tokens=8, stream=stream, **options)
    assert (text_of(answer), finish_of(answer)) == (text, "stop")


def test_no_token_is_lost_or_doubled_around_a_stop_word(ring: Ring) -> None:
    """NVIDIA/TensorRT-LLM PR#5762."""
    answer = ring.complete("1 2 3 4 5 6 7", max_tokens=24, stop=["12"], stream=True)
    assert text_of(answer) == " 8 9 10 11 "


@pytest.mark.parametrize("limits", [{}, {"max_tokens": None}])
def test_a_chat_without_max_tokens_runs_to_its_end(ring: Ring, limits: Body) -> None:
    """vllm-project/production-stack PR#797: 400 for a missing max_tokens."""
    answer = ring.chat("Hi", **limits)
    assert text_of(answer) == "Hello! How can I assist you today?"
    assert answer["usage"]["prompt_tokens"] == 31
    assert answer["usage"]["completion_tokens"] == 10


def test_max_completion_tokens_is_the_newer_name(ring: Ring) -> None:
    answer = ring.chat("Hi", max_completion_tokens=3)
    assert answer["usage"]["completion_tokens"] == 3


@streaming
def test_logprobs_come_for_every_token_including_the_first(ring: Ring, stream: bool) -> None:
    """sgl-project/sglang PR#26299: top_logprobs killed the detokenizer."""
    body = {"prompt": FRANCE, "max_tokens": 4, "temperature": 0, "logprobs": 5, "stream": stream}
    if stream:
        from tests.cluster.harness import stream as events

        pieces = [e["choices"][0] for e in events(ring.http, "/v1/completions", body)]
        lists = [p["logprobs"] for p in pieces if p.get("logprobs")]
        logprobs = [value for part in lists for value in part["token_logprobs"]]
        tops = [top for part in lists for top in part["top_logprobs"]]
    else:
        part = ring.post("/v1/completions", body).json()["choices"][0]["logprobs"]
        logprobs, tops = part["token_logprobs"], part["top_logprobs"]
    assert logprobs[0] == pytest.approx(-0.2581, abs=1e-3)
    assert len(logprobs) == 4
    assert [len(top) for top in tops] == [5] * 4


def test_chat_logprobs(ring: Ring) -> None:
    answer = ring.chat("Hi", logprobs=True, top_logprobs=5)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 10
    assert all(len(entry["top_logprobs"]) == 5 for entry in content)


def test_several_choices_share_one_prefill(ring: Ring) -> None:
    """sgl-project/sglang PR#30723: n > 1 hung until the timeout."""
    before = ring.total("prefill", "num_tokens_prefilled")
    answer = ring.complete(FRANCE, n=3, max_tokens=8)
    assert [ids_of(answer, index) for index in range(3)] == [FRANCE_IDS] * 3
    assert answer["usage"] == {**answer["usage"], "prompt_tokens": 5, "completion_tokens": 24}
    ring.assert_drained()
    assert ring.total("prefill", "num_tokens_prefilled") - before == 5


def test_sampled_choices_differ_and_keep_their_order(ring: Ring) -> None:
    answer = ring.complete(FRANCE, n=3, max_tokens=16, temperature=0.8, seed=1)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({tuple(ids_of(answer, index)) for index in range(3)}) > 1
    pair = ring.complete([FRANCE, "A B C D E F G"], n=2, max_tokens=8)
    assert ids_of(pair, 0) == ids_of(pair, 1) == FRANCE_IDS
    assert ids_of(pair, 2) == ids_of(pair, 3) == [407, 339, 659, 450, 377, 1606, 428, 334]


def test_the_first_token_obeys_temperature_and_bias(ring: Ring) -> None:
    """tenstorrent/tt-metal #32025: it was always the argmax."""
    calls = [lambda: ring.complete("A", max_tokens=1, temperature=2.0) for _ in range(60)]
    assert len({ids_of(answer)[0] for answer in ring.at_once(calls)}) > 20
    biased = ring.complete(FRANCE, max_tokens=4, logit_bias={"7042": -100})
    assert ids_of(biased) == [260, 3575, 282, 260]


def test_penalties_know_where_the_prompt_ends(ring: Ring) -> None:
    """vllm-project/vllm-metal PR#69: prompt tokens counted as output, or the first one lost."""
    laughing = "ha ha ha ha ha ha"
    answer = ring.complete(laughing, max_tokens=10, frequency_penalty=1.0)
    assert ids_of(answer) == [421, 88, 421, 421, 421, 421, 3250, 30, 198, 198]
    answer = ring.complete(laughing, max_tokens=3, repetition_penalty=1.3)
    assert ids_of(answer) == [88, 30, 198]


def test_a_seeded_answer_does_not_depend_on_its_batch_mates(ring: Ring) -> None:
    """vllm-project/vllm #51226."""
    seeded: Body = {"max_tokens": 16, "temperature": 0.8, "seed": 42}
    alone = [ids_of(ring.complete(FRANCE, **seeded)) for _ in range(3)]
    assert alone[0] == alone[1] == alone[2]
    mates = [
        lambda n=n: ring.complete(
            FRANCE, **({**seeded, "seed": n} if n % 2 else {**seeded, "seed": None})
        )
        for n in range(14)
    ]
    answers = ring.at_once([*mates, lambda: ring.complete(FRANCE, **seeded)])
    assert ids_of(answers[-1]) == alone[0]


def test_min_tokens_holds_eos_back(ring: Ring) -> None:
    """ai-dynamo/dynamo PR#14276."""
    answer = ring.complete(GREETED, max_tokens=6, min_tokens=2)
    assert 2 not in ids_of(answer)[:2]
    assert len(ids_of(answer)) >= 2


def test_tokens_stream_in_order_without_gap_or_repeat(ring: Ring) -> None:
    whole = ring.complete("1 2 3 4 5 6 7", max_tokens=24)
    parts = ring.complete("1 2 3 4 5 6 7", max_tokens=24, stream=True)
    assert ids_of(parts) == ids_of(whole)
    assert text_of(parts) == text_of(whole) == " 8 9 10 11 12 13 14 15 1"


def test_timing_is_given_when_asked_for(ring: Ring) -> None:
    timing = ring.complete(FRANCE, max_tokens=8, return_timing=True)["timing"]
    assert timing["num_kv_bytes"] == 5 * 46_080
    for name in ("queue_s", "prefill_s", "ttft_s", "handoff_gap_s", "transfer_s"):
        assert timing[name] >= 0, name
    assert timing["prefill_worker_id"] in {w["worker_id"] for w in ring.workers("prefill")}
    assert timing["decode_worker_id"] in {w["worker_id"] for w in ring.workers("decode")}
