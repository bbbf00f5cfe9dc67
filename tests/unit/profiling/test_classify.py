from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.profiling.classify import classify, explain, largest_host_phase, slot_limit
from splitserve.profiling.evidence import BOTTLENECKS, Bottleneck, Evidence
from tests.unit.profiling.evidences import BUSY, busy, evidences

HOST_HEAVY: dict[str, Any] = {"forward_s": 0.5, "cap_s": 0.5, "schedule_s": 0.44}
HALF_EMPTY: dict[str, Any] = {
    "num_slots_allowed": 1600,
    "cap_s": 0.0,
    "no_request_s": 0.9,
    "full_batch_gain": 6.0,
}


@pytest.mark.parametrize(
    ("changes", "bottleneck"),
    [
        ({}, "memory"),
        ({"compute_floor_s": 0.7, "floor_s": 0.7}, "compute"),
        ({"memory_floor_s": 0.1, "compute_floor_s": 0.1, "floor_s": 0.1}, "kernels"),
        (HOST_HEAVY, "host"),
        (HALF_EMPTY, "batching"),
        ({**HALF_EMPTY, "no_request_s": 0.0, "no_blocks_s": 0.9}, "batching"),
        ({**HALF_EMPTY, "no_request_s": 0.0, "waiting_for_kv_s": 0.9}, "transfer"),
        ({"window_s": 2.0, "kv_wait_s": 1.0}, "transfer"),
        ({"window_s": 4.0, "wait_s": 3.0}, "idle"),
    ],
)
def test_each_class_has_its_evidence(changes: dict[str, Any], bottleneck: Bottleneck) -> None:
    assert classify(dataclasses.replace(BUSY, **changes)) == bottleneck


@pytest.mark.parametrize(
    ("at", "below", "bottleneck"),
    [
        ({"kv_wait_s": 0.25}, {"kv_wait_s": 0.2499}, "transfer"),
        ({"wait_s": 0.5}, {"wait_s": 0.4999}, "idle"),
        # 0.1 s of host work beside the forward pass
        ({"forward_s": 0.233}, {"forward_s": 0.234}, "host"),
        (
            {**HALF_EMPTY, "full_batch_gain": 1.5},
            {**HALF_EMPTY, "full_batch_gain": 1.49},
            "batching",
        ),
        ({"floor_s": 0.225}, {"floor_s": 0.2249}, "memory"),
        # under half of a roof, bytes must outweigh FLOPs twice over
        (
            {"memory_floor_s": 0.4, "compute_floor_s": 0.2, "floor_s": 0.4},
            {"memory_floor_s": 0.4, "compute_floor_s": 0.21, "floor_s": 0.41},
            "memory",
        ),
        (
            {"floor_s": 0.45, "memory_floor_s": 0.1, "compute_floor_s": 0.45},
            {"floor_s": 0.449, "memory_floor_s": 0.1, "compute_floor_s": 0.449},
            "compute",
        ),
    ],
)
def test_at_a_threshold_the_class_is_named_and_below_it_is_not(
    at: dict[str, Any], below: dict[str, Any], bottleneck: Bottleneck
) -> None:
    assert classify(dataclasses.replace(BUSY, **at)) == bottleneck
    assert classify(dataclasses.replace(BUSY, **below)) != bottleneck


def test_the_checklist_is_asked_in_order() -> None:
    """One window with everything wrong: mending what is named brings up the next."""
    all_wrong: dict[str, Any] = {
        **HALF_EMPTY,
        "window_s": 4.0,
        "kv_wait_s": 1.0,
        "wait_s": 2.0,
        "schedule_s": 0.6,
    }
    named = [classify(dataclasses.replace(BUSY, floor_s=0.1, **all_wrong))]
    for mended in (
        {"kv_wait_s": 0.0},
        {"wait_s": 0.0},
        {"schedule_s": 0.04},
        {"full_batch_gain": 1.0},
    ):
        all_wrong |= mended
        named.append(classify(dataclasses.replace(BUSY, floor_s=0.1, **all_wrong)))
    named.append(classify(BUSY))
    assert named == ["transfer", "idle", "host", "batching", "kernels", "memory"]


def test_a_batch_that_would_gain_nothing_from_being_full_counts_as_full() -> None:
    bound = {"full_batch_gain": 1.0, "compute_floor_s": 0.8, "floor_s": 0.8}
    assert classify(dataclasses.replace(BUSY, **{**HALF_EMPTY, **bound})) == "compute"


def test_the_limit_with_most_forward_time_counts() -> None:
    mixed = busy(**{**HALF_EMPTY, "cap_s": 0.2, "waiting_for_kv_s": 0.3, "no_request_s": 0.4})
    assert slot_limit(mixed) == "no_request"
    assert slot_limit(Evidence()) == "cap"


@pytest.mark.parametrize(
    ("waits", "bottleneck"),
    [
        ({}, "idle"),
        ({"wait_s": 0.4, "kv_wait_s": 0.2}, "idle"),
        ({"wait_s": 0.19, "kv_wait_s": 0.2}, "transfer"),
        ({"wait_s": 0.4, "receive_s": 0.6}, "host"),  # it has its hands full, and computes nothing
        ({"wait_s": 0.4, "receive_s": 0.1}, "idle"),
    ],
)
def test_without_a_step_it_is_the_longer_wait_unless_the_host_was_longer(
    waits: dict[str, Any], bottleneck: Bottleneck
) -> None:
    assert classify(Evidence(window_s=1.0, **waits)) == bottleneck


ANY_FLOAT = st.sampled_from([0.0, math.inf, math.nan, -1.0]) | st.floats()


@given(
    st.builds(
        Evidence,
        **{
            field.name: ANY_FLOAT if field.type == "float" else st.integers()
            for field in dataclasses.fields(Evidence)
            if field.name != "bottleneck"
        },
    )
)
def test_whatever_the_numbers_there_is_one_class(evidence: Evidence) -> None:
    assert classify(evidence) in BOTTLENECKS


@given(evidences())
def test_every_window_can_be_explained_in_one_line(evidence: Evidence) -> None:
    text = explain(evidence)
    assert text.startswith(f"{evidence.bottleneck}: ")
    assert "\n" not in text
    assert any(character.isdigit() for character in text)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            HOST_HEAVY,
            "host: 50 % of busy time is Python around forward passes, most of it schedule (44 %)",
        ),
        (
            HALF_EMPTY,
            "batching: batches fill 10 % of their slots, in 100 % of forward time because no other"
            " request is here; full ones would do 6.0 times the work per second",
        ),
        (
            {"window_s": 2.0, "kv_wait_s": 1.0},
            "transfer: 50 % of the time is a wait for KV on its way",
        ),
        (
            {**HALF_EMPTY, "no_request_s": 0.0, "waiting_for_kv_s": 0.9},
            "transfer: batches fill 10 % of their slots, in 100 % of forward time because those who"
            " would join wait for their KV; full ones would do 6.0 times the work per second",
        ),
        (
            {},
            "memory: moving the bytes takes at least 60 % of forward time, the FLOPs 22 %",
        ),
        (
            {"compute_floor_s": 0.72, "floor_s": 0.72},
            "compute: the FLOPs take at least 80 % of forward time, moving the bytes 60 %",
        ),
        (
            {"floor_s": 0.09},
            "kernels: forward passes reach 10 % of what the machine can do, with full batches; the"
            " nearer roof is memory",
        ),
        (
            {"floor_s": 0.09, "full_batch_gain": 1.2, "cap_s": 0.0, "no_request_s": 0.9},
            "kernels: forward passes reach 10 % of what the machine can do, and full batches would"
            " do only 1.2 times the work per second; the nearer roof is memory",
        ),
        (
            {"window_s": 4.0, "wait_s": 3.0},
            "idle: 75 % of the time there is nothing that it could compute",
        ),
    ],
)
def test_the_line_has_the_numbers_that_decided(changes: dict[str, Any], text: str) -> None:
    assert explain(busy(**changes)) == text


def test_the_largest_host_phase_is_found() -> None:
    assert largest_host_phase(busy(sample_s=0.5)) == ("sample", 0.5)
