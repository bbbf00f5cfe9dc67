"""The normal course of requests through both workers, over real sockets."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from splitserve.request import Sampling
from splitserve.wire import messages as m
from tests.fake_runner import VOCAB_SIZE, FakeRunner, answer
from tests.ring import Ring, open_ring, prompt_of
from tests.scripted_coordinator import EPOCH


@pytest.fixture
def ring() -> Iterator[Ring]:
    with open_ring() as ring:
        yield ring


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 31, 32, 33, 100])
def test_an_answer_goes_round_the_ring(ring: Ring, length: int) -> None:
    ring.start_decode()
    ring.start_prefill(max_num_batched_tokens=13)
    prompt = prompt_of(length, length)
    ring.ask("a", prompt, max_tokens=9)
    ring.wait_for_tokens("a", 9)
    assert ring.tokens("a") == answer(prompt, 1, 9)
    ring.wait_for(lambda: bool(ring.coordinator.of(m.HandedOver)), "HandedOver")
    (handed_over,) = ring.coordinator.of(m.HandedOver)
    assert handed_over.num_kv_bytes == length * FakeRunner(1).layout.token_bytes


def test_choices_share_the_prompt_and_go_their_own_ways(ring: Ring) -> None:
    decode = ring.start_decode()
    ring.start_prefill()
    prompt = prompt_of(1, 10)
    ring.ask("a", prompt, max_tokens=12, seeds=(1, 2, 3))
    for choice_id in range(3):
        ring.wait_for_tokens("a", 12, choice_id)
        assert ring.tokens("a", choice_id) == answer(prompt, choice_id + 1, 12)
    assert len(decode.copies) == 2


def test_one_token_opens_nothing(ring: Ring) -> None:
    ring.start_decode()
    ring.start_prefill()
    ring.ask("a", prompt_of(1, 10), max_tokens=1)
    ring.wait_for(lambda: bool(ring.coordinator.of(m.HandedOver)), "HandedOver")
    assert ring.tokens("a") == answer(prompt_of(1, 10), 1, 1)
    assert ring.workers["decode"].stats().num_kv_bytes_received == 0
    assert ring.coordinator.of(m.Tokens) == []


def test_prompts_that_arrive_during_a_step_are_not_forgotten(ring: Ring) -> None:
    ring.start_decode()
    ring.start_prefill(num_blocks=4)
    for number in range(200):
        ring.ask(f"r{number}", prompt_of(number, 9), max_tokens=1)
    ring.wait_for(lambda: len(ring.coordinator.of(m.HandedOver)) == 200, "all handed over")


def test_transfers_larger_than_the_staging_budget_go_on(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames wait for room; when it comes while others are being sent, nobody says so."""
    monkeypatch.setattr("prefill_worker.worker.MAX_FRAME_BYTES", 200)
    ring.start_decode(num_blocks=30)
    ring.start_prefill(staging_bytes=500)
    prompts = {f"r{n}": prompt_of(n, 90) for n in range(6)}
    for request_id, prompt in prompts.items():
        ring.ask(request_id, prompt, max_tokens=3, clocks=(60.0, 5.0))
    for request_id, prompt in prompts.items():
        ring.wait_for_tokens(request_id, 3)
        assert ring.tokens(request_id) == answer(prompt, 1, 3)


@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3)])
def test_a_decode_worker_alone_does_both(ring: Ring, seeds: tuple[int, ...]) -> None:
    ring.start_decode(max_num_batched_tokens=8)
    prompt = prompt_of(2, 37)
    ring.ask("a", prompt, max_tokens=9, seeds=seeds, to=("decode", None))
    for choice_id, seed in enumerate(seeds):
        ring.wait_for_tokens("a", 9, choice_id)
        assert ring.tokens("a", choice_id) == answer(prompt, seed, 9)


def test_many_prompts_through_tiny_pools(ring: Ring) -> None:
    """Preemption, Queued, and two prefill workers that each hold at most two prompts."""
    ring.start_decode(num_blocks=12)
    ring.start_prefill("p0", num_blocks=8, max_num_batched_tokens=7)
    ring.start_prefill("p1", num_blocks=8, max_num_batched_tokens=7)
    prompts = {f"r{n}": prompt_of(n, 1 + n % 15) for n in range(64)}
    for number, (request_id, prompt) in enumerate(prompts.items()):
        ring.ask(request_id, prompt, max_tokens=20, to=(f"p{number % 2}", "decode"))
    for request_id, prompt in prompts.items():
        ring.wait_for_tokens(request_id, 20)
        assert ring.tokens(request_id) == answer(prompt, 1, 20)
    assert ring.workers["decode"].stats().num_preemptions > 0
    assert ring.coordinator.of(m.Failed) == []


def test_releases_at_any_moment_leave_the_others_right(ring: Ring) -> None:
    """sgl-project/sglang PR#35360: a late write of an aborted transfer hit reused blocks."""
    ring.start_decode(num_blocks=12)
    ring.start_prefill(num_blocks=12, max_num_batched_tokens=5)
    generator = random.Random(5)
    kept = []
    for number in range(120):
        request_id, prompt = f"r{number}", prompt_of(number, 1 + generator.randrange(30))
        ring.ask(request_id, prompt, max_tokens=6)
        if generator.random() < 0.6:
            threading.Event().wait(generator.random() * 0.01)
            for worker in ("prefill", "decode"):
                ring.coordinator.release(worker, request_id)
        else:
            kept.append((request_id, prompt))
    for request_id, prompt in kept:
        ring.wait_for_tokens(request_id, 6)
        assert ring.tokens(request_id) == answer(prompt, 1, 6)
    assert ring.coordinator.of(m.Failed) == []


def test_an_open_for_someone_else_is_refused(ring: Ring) -> None:
    ring.start_decode()
    ring.start_prefill()
    message = m.Prefill(
        "a",
        0,
        EPOCH,
        prompt_of(1, 5),
        5,
        (m.Choice(0, 1),),
        Sampling(max_tokens=4),
        60.0,
        10.0,
        "decode-of-yesterday",
        ring.coordinator.hellos["decode"].endpoints[0],
    )
    ring.coordinator.send("prefill", message)
    ring.wait_for(lambda: bool(ring.coordinator.of(m.Failed)), "Failed")
    (failed,) = ring.coordinator.of(m.Failed)
    assert "decode-of-yesterday" in failed.reason and failed.retriable and failed.kept
    ring.release("a")


def test_a_prompt_that_never_fits_fails_at_once(ring: Ring) -> None:
    ring.start_decode(num_blocks=4)
    ring.start_prefill()
    ring.ask("a", prompt_of(1, 40))
    ring.wait_for(lambda: bool(ring.coordinator.of(m.Failed)), "Failed")
    assert "never fit in 4 blocks" in ring.coordinator.of(m.Failed)[0].reason


def test_an_unreachable_decode_worker_fails_the_request_in_time(ring: Ring) -> None:
    """vllm-project/vllm PR#26171: stuck for ever on a dead handshake."""
    ring.start_prefill()
    ring.coordinator.hellos["decode"] = m.Hello(
        "decode", "decode", "decode", 1, "host", endpoints=("tcp://127.0.0.1:1",)
    )
    ring.ask("a", prompt_of(1, 5), clocks=(60.0, 0.3))
    ring.wait_for(lambda: bool(ring.coordinator.of(m.Failed)), "Failed")
    (failed,) = ring.coordinator.of(m.Failed)
    assert failed.stage == "transfer" and failed.kept
    ring.release("a")


def test_a_deadline_ends_a_request_on_both_sides(ring: Ring) -> None:
    ring.start_decode()
    ring.start_prefill()
    ring.ask("a", prompt_of(1, 5), max_tokens=1_000_000, clocks=(0.3, 10.0))
    ring.wait_for(lambda: bool(ring.coordinator.of(m.Failed)), "Failed")
    assert ring.coordinator.of(m.Failed)[0].stage == "deadline"


def test_drain_finishes_what_is_there_and_takes_nothing_new(ring: Ring) -> None:
    runner = ring.start_decode(num_blocks=128)
    runner.at_full_speed.clear()  # "a" is still here when "b" comes
    ring.start_prefill()
    ring.ask("a", prompt_of(1, 5), max_tokens=300)
    ring.wait_for_tokens("a", 2)
    ring.coordinator.send("decode", m.Drain(EPOCH, 30.0))
    ring.wait_for(lambda: ring.draining("decode"), "it drains")
    ring.ask("b", prompt_of(2, 5))
    ring.wait_for(lambda: bool(ring.coordinator.of(m.Failed)), "b is refused")
    ring.coordinator.release("prefill", "b")
    runner.at_full_speed.set()
    ring.wait_for_tokens("a", 300)
    assert ring.tokens("a") == answer(prompt_of(1, 5), 1, 300)
    assert "draining" in ring.coordinator.of(m.Failed)[0].reason


def test_observed_workers_tell_the_kernels_of_their_next_steps(ring: Ring) -> None:
    ring.start_decode()
    ring.start_prefill()
    for name in ("prefill", "decode"):
        ring.wait_for(lambda: name in ring.coordinator.hellos, name)  # noqa: B023
        ring.coordinator.send(name, m.Observe(ring.coordinator.epoch, 60.0, 3))
    ring.ask("a", prompt_of(1, 90))  # three chunks
    ring.expect_answer("a", prompt_of(1, 90))

    def num_told(name: str) -> int:
        said = [one for one in ring.coordinator.of(m.Observed) if one.worker_id == name]
        return sum(len(one.kernels) for one in said)

    for name in ("prefill", "decode"):
        ring.wait_for(lambda: num_told(name) == 3, f"kernels of {name}")  # noqa: B023


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, 10**8])
@pytest.mark.parametrize("max_tokens", [1, 8])
def test_a_token_that_the_model_lacks_is_refused_before_it_is_computed(
    ring: Ring, token_id: int, max_tokens: int
) -> None:
    """Compiled code takes a token id as a place in memory."""
    ring.start_decode()
    ring.start_prefill()
    ring.ask("bad", (1, token_id, 2), max_tokens=max_tokens)
    failed = ring.first_failure()
    assert (failed.stage, failed.retriable) == ("admission", False)
    assert f"outside the vocabulary of {VOCAB_SIZE}" in failed.reason
    prompt = prompt_of(1, 10)
    ring.ask("good", prompt)
    ring.wait_for_tokens("good", 8)
    assert ring.tokens("good") == answer(prompt, 1, 8)
