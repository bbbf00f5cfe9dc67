from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from splitserve.config import Promises
from splitserve.launch.hosted import bundle_of, for_ray
from splitserve.launch.plan import (
    UNPINNED,
    Comeback,
    CoreShare,
    LaunchPlan,
    WorkerPlace,
    share_cores,
)
from splitserve.settings import resolve


def plan_of(cores: tuple[int, ...] = (0, 1), **given: Any) -> LaunchPlan:
    return LaunchPlan(
        resolve({"model": "m", **given}, environ={}), "/models/m", cores, parent_pid=7
    )


@pytest.mark.parametrize(
    ("asked", "cores", "expected"),
    [
        ([None, None], (0, 1), [((0,), 1), ((1,), 1)]),
        ([None], (0, 1), [((0, 1), 2)]),
        ([None, None], (2, 5, 7, 9, 11), [((2, 5), 2), ((7, 9), 2)]),
        ([None, None, None], (0, 1), [(None, 1)] * 3),
        ([1, 1], (0, 1, 2, 3), [((0,), 1), ((1,), 1)]),
        ([4, 4], (0, 1), [(None, 4)] * 2),
        ([3, None], (0, 1, 2, 3), [(None, 3), (None, 1)]),
        ([3, 1], (0, 1, 2, 3), [((0, 1, 2), 3), ((3,), 1)]),
        ([None], (), [(None, 1)]),
        ([], (0, 1), []),
    ],
)
def test_cores_are_shared_without_overlap_or_not_at_all(
    asked: list[int | None], cores: tuple[int, ...], expected: list[tuple[Any, int]]
) -> None:
    """vllm-project/vllm PR#6109, #43240: a thread for every core in each worker."""
    assert share_cores(asked, cores) == tuple(CoreShare(*share) for share in expected)


def test_worker_config_says_all_a_worker_needs() -> None:
    plan = plan_of(decode_num_blocks=12, log_level="debug", heartbeat_timeout_s=5)
    config = plan.worker(WorkerPlace("decode", "decode-9", 0), "tcp://127.0.0.1:1")
    assert (config.role, config.launch_id, config.bind_host) == ("decode", "decode-9", "127.0.0.1")
    assert (config.engine.model, config.engine.num_blocks) == ("/models/m", 12)
    assert (config.cores, config.engine.num_threads, config.device) == ((1,), 1, "cpu")
    assert (config.control_endpoint, config.parent_pid) == ("tcp://127.0.0.1:1", 7)
    assert config.liveness.heartbeat_timeout_s == 5


def test_coordinator_config_says_all_a_coordinator_needs() -> None:
    config = plan_of(prefill=0, decode=2, port=0, api_key="k", served_model_name="x").coordinator()
    assert (config.model, config.model_name) == ("/models/m", "m")
    assert config.served_model_names == ("x",)
    assert (config.num_prefill, config.num_decode) == (0, 2)
    assert (config.port, config.api_keys, config.parent_pid) == (0, ("k",), 7)


def test_coordinator_that_comes_back_keeps_its_ports_and_the_wanted_numbers() -> None:
    plan = plan_of(port=0, decode=2, max_restarts=3, drain_grace_s=7)
    first = plan.coordinator()
    assert (first.control_port, first.successor) == (0, False)
    assert (first.max_restarts, first.drain_grace_s) == (3, 7)
    promises = Promises(100, 200, 8, 32, 16)
    again = plan.coordinator(Comeback(8123, 4567, 0, 9, promises, "it was killed"))
    assert (first.promises, again.promises) == (None, promises)
    assert (first.previous_end, again.previous_end) == ("", "it was killed")
    assert (again.port, again.control_port, again.successor) == (8123, 4567, True)
    assert (again.num_prefill, again.num_decode) == (0, 9)
    assert (
        dataclasses.replace(
            again,
            port=0,
            control_port=0,
            successor=False,
            num_prefill=1,
            num_decode=2,
            promises=None,
            previous_end="",
        )
        == first
    )


def test_slots_added_later_are_unpinned() -> None:
    plan = plan_of()
    assert plan.share("prefill", 0) == CoreShare((0,), 1)
    assert plan.share("prefill", 1) == UNPINNED
    assert plan_of(num_threads=2).share("decode", 5) == CoreShare(None, 2)


def test_gpus_are_given_in_order_and_their_memory_is_divided() -> None:
    plan = plan_of(prefill=2, decode=3, prefill_devices="0", decode_devices="1,2")

    def gpu(role: Any, slot: int) -> tuple[str, float]:
        config = plan.worker(WorkerPlace(role, "x", slot), "tcp://127.0.0.1:1")
        return config.device, round(config.engine.gpu_memory_utilization, 6)

    assert gpu("prefill", 0) == gpu("prefill", 1) == ("cuda:0", 0.45)
    assert gpu("decode", 0) == gpu("decode", 2) == ("cuda:1", 0.45)
    assert gpu("decode", 1) == ("cuda:2", 0.9)


def test_on_ray_threads_and_gpu_memory_are_what_ray_set_aside() -> None:
    file = {"prefill": {"num_cpus": 3}, "decode": {"num_cpus": 0.5, "num_gpus": 0.5}}
    settings = for_ray(resolve({"model": "m"}, file=file, environ={}))
    assert settings.prefill.engine.num_threads == 3
    assert settings.decode.engine.num_threads == 1
    assert settings.decode.engine.gpu_memory_utilization == pytest.approx(0.45)
    assert bundle_of(settings.decode) == {"CPU": 0.5, "GPU": 0.5}


def test_bundle_has_custom_resources_and_the_accelerator() -> None:
    file = {"decode": {"num_cpus": 0, "resources": {"decode": 1}, "accelerator_type": "H200"}}
    pool = resolve({"model": "m"}, file=file, environ={}).decode
    assert bundle_of(pool) == {"decode": 1, "accelerator_type:H200": 0.001}
