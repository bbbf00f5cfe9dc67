from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest

from splitserve.bench.workloads import (
    WORKLOADS,
    BenchSpec,
    MixedSpec,
    arrival_times_s,
    fresh_seed,
    make_prompts,
    mixed_prompt,
    request_body,
    warm_up_of,
    workload_of,
)
from splitserve.errors import ConfigError

SPEC = BenchSpec(num_requests=8, prompt_tokens=20, output_tokens=5, concurrency=3)


def test_prompts_are_seeded_share_a_prefix_and_avoid_special_ids() -> None:
    spec = dataclasses.replace(SPEC, shared_prefix_tokens=7, vocab_size=1500, seed=3)
    prompts = make_prompts(spec)
    assert prompts == make_prompts(spec)
    assert prompts != make_prompts(dataclasses.replace(spec, seed=4))
    assert {len(prompt) for prompt in prompts} == {20}
    assert len({tuple(prompt[:7]) for prompt in prompts}) == 1
    assert len({tuple(prompt[7:]) for prompt in prompts}) == 8
    assert all(1000 <= token < 1500 for prompt in prompts for token in prompt)


def test_no_two_seeds_have_a_prompt_in_common() -> None:
    specs = [dataclasses.replace(SPEC, seed=seed) for seed in range(20)]
    warm_ups = [spec for one in specs if isinstance(spec := warm_up_of(one), BenchSpec)]
    prompts = [tuple(prompt) for spec in (*specs, *warm_ups) for prompt in make_prompts(spec)]
    assert len(set(prompts)) == len(prompts) == 20 * (8 + 3)


def test_fresh_seeds_differ_and_stay_below_those_of_warm_up() -> None:
    seeds = {fresh_seed() for _ in range(20)}
    assert len(seeds) > 15
    warm_up = warm_up_of(SPEC)
    assert warm_up is not None and max(seeds) < warm_up.seed - 1000


def test_requests_pin_the_amount_of_work() -> None:
    body = request_body(SPEC, "m", [1000, 1001])
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (5, 0, True)
    assert (body["stream"], body["prompt"]) == (True, [1000, 1001])


def test_workloads_are_those_of_the_documentation() -> None:
    w2 = WORKLOADS["w2"]
    assert isinstance(w2, BenchSpec)
    assert (w2.prompt_tokens, w2.shared_prefix_tokens, w2.concurrency) == (544, 512, 16)
    w3 = WORKLOADS["w3"]
    assert isinstance(w3, MixedSpec)
    assert (w3.num_streams, w3.stream_output_tokens, w3.long_prompt_tokens) == (4, 400, 2000)
    assert (w3.period_s, w3.duration_s, w3.long_output_tokens) == (8, 60, 16)


def test_parts_of_a_workload_can_be_changed() -> None:
    spec = workload_of("w1", {"num_requests": 4, "output_tokens": None, "seed": 9})
    assert spec == BenchSpec(4, 256, 64, concurrency=16, seed=9)
    rate = workload_of("w1", {"request_rate": 2.0, "concurrency": None})
    assert isinstance(rate, BenchSpec) and (rate.request_rate, rate.concurrency) == (2.0, None)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("w3", {"num_requests": 4}, "w3 has no --num-requests; did you mean --num-streams"),
        ("w1", {"duration_s": 4.0}, "w1 has no --duration-s"),
        ("w1", {"request_rate": 2.0, "concurrency": 2}, "not both"),
        ("w2", {"prompt_tokens": 500}, "--shared-prefix-tokens 512 is above --prompt-tokens 500"),
    ],
)
def test_changes_that_make_no_sense_are_refused(
    name: str, given: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        workload_of(name, given)


def test_warm_up_meets_the_batch_sizes_and_leaves_no_prefix() -> None:
    w2 = WORKLOADS["w2"]
    warm_up = warm_up_of(w2)
    assert isinstance(w2, BenchSpec) and isinstance(warm_up, BenchSpec)
    assert (warm_up.num_requests, warm_up.concurrency, warm_up.output_tokens) == (16, 16, 8)
    assert make_prompts(warm_up)[0][:16] != make_prompts(w2)[0][:16]
    two = warm_up_of(w2, 2)
    assert isinstance(two, BenchSpec) and (two.num_requests, two.concurrency) == (2, 2)
    assert warm_up_of(w2, 0) is warm_up_of(WORKLOADS["w3"], 0) is None


def test_arrivals_are_a_seeded_poisson_process() -> None:
    spec = dataclasses.replace(SPEC, concurrency=None, request_rate=50.0, num_requests=2001)
    times_s = arrival_times_s(spec)
    gaps_s = [later - earlier for earlier, later in pairwise(times_s)]
    assert times_s[0] == 0 and times_s == arrival_times_s(spec)
    assert times_s != arrival_times_s(dataclasses.replace(spec, seed=1))
    mean = sum(gaps_s) / len(gaps_s)
    variance = sum((gap - mean) ** 2 for gap in gaps_s) / len(gaps_s)
    assert mean == pytest.approx(1 / 50, rel=0.1)
    assert variance == pytest.approx(mean**2, rel=0.2)  # as of an exponential distribution


def test_no_two_prompts_of_a_mixed_load_share_a_prefix() -> None:
    spec = MixedSpec()
    prompts = [mixed_prompt(spec, kind, i) for kind in ("stream", "long") for i in range(20)]
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 40
    assert [len(prompt) for prompt in prompts] == [32] * 20 + [2000] * 20
    other = dataclasses.replace(spec, seed=1)
    assert mixed_prompt(spec, "long", 0) == mixed_prompt(spec, "long", 0)
    assert mixed_prompt(spec, "long", 0) != mixed_prompt(other, "long", 0)
