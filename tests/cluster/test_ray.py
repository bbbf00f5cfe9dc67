"""The same cluster on a real Ray with logical resources: placed, scaled, ended, nothing left."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from splitserve import Client
from splitserve.errors import LaunchError
from splitserve.settings import ServeSettings, resolve
from tests.cluster.clients import prompt
from tests.cluster.tiny_answers import greedy
from tests.unit.launch.fakes import is_running
from tests.waiting import wait_until

ray = pytest.importorskip("ray")
PROMPT = prompt(1)
# What Ray's own sockets and pipes do in this process is not ours to judge.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def settings_of(model: Path, name: str, **given: Any) -> ServeSettings:
    given = {"port": 0, "dtype": "float32", "num_blocks": 64, "stop_grace_s": 5, **given}
    given |= {"ray_name": name, "ray_placement_timeout_s": given.pop("placement_timeout_s", 20)}
    file = {"prefill": {"resources": {"prefill": 1}}}
    return resolve({"model": str(model), **given}, file=file, environ={})


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[ModuleType]:
    """A Ray of our own with eight logical CPUs, whatever the machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            address="local",
            num_cpus=8,
            resources={"prefill": 2},
            include_dashboard=False,
            logging_level="warning",
        )
        from splitserve.launch import ray_cluster

        yield ray_cluster
        ray.shutdown()


def pids_of(client: Client) -> list[int]:
    cluster = client.cluster()
    return [cluster["coordinator"]["pid"], *(worker["pid"] for worker in cluster["workers"])]


def ready(client: Client, role: str) -> list[dict[str, Any]]:
    workers = client.cluster()["workers"]
    return [w for w in workers if w["role"] == role and w["state"] == "ready"]


def num_worker_actors() -> int:
    """Processes of Ray that run a WorkerActor."""
    titles = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            titles.append(path.read_bytes())
    return sum(title.startswith(b"ray::WorkerActor") for title in titles)


def assert_nothing_left(pids: list[int]) -> None:
    wait_until(lambda: not any(is_running(pid) for pid in pids), 5, "end of every process")
    free = ray.available_resources
    wait_until(lambda: free().get("CPU") == 8, 10, "every CPU back")
    states = {group["state"] for group in ray.util.placement_group_table().values()}
    assert states <= {"REMOVED"}


def test_two_prefill_one_decode_then_one_more_then_down(
    ray_cluster: ModuleType, tiny_model: Path
) -> None:
    settings = settings_of(tiny_model, "grows", prefill=2, decode=1)
    right = tuple(greedy(tiny_model, PROMPT, 40))
    with Client(ray_cluster.up(settings)) as client:
        options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "return_token_ids": True}
        options["ignore_eos"] = True
        assert client.generate(PROMPT, **options).token_ids == right
        assert len(ready(client, "prefill")) == 2
        with pytest.raises(LaunchError, match="'grows' is up or starting"):
            ray_cluster.up(settings)
        client.scale(prefill=2, decode=2)
        wait_until(lambda: len(ready(client, "decode")) == 2, 60, "a second decode worker")
        answers = list(client.submit([PROMPT] * 8, concurrency=8, **options).results(60))
        assert {answer.token_ids for answer in answers} == {right}
        wait_until(
            lambda: all(worker["num_tokens_decoded"] for worker in ready(client, "decode")),
            5,
            "traffic on both decode workers",
        )
        pids = pids_of(client)
        assert len(pids) == 5
    ray_cluster.down(settings.ray)
    assert_nothing_left(pids)
    with pytest.raises(LaunchError, match="no cluster named 'grows'"):
        ray_cluster.down(settings.ray)


def test_worker_killed_inside_its_actor_takes_the_actor_with_it(
    ray_cluster: ModuleType, tiny_model: Path
) -> None:
    """ray-project/ray PR#60145: the engine was dead, and its actor lived on."""
    settings = settings_of(tiny_model, "loses", prefill=1, decode=1)
    with Client(ray_cluster.up(settings)) as client:
        pids = pids_of(client)
        (prefill,) = ready(client, "prefill")
        assert num_worker_actors() == 2
        os.kill(prefill["pid"], signal.SIGKILL)
        wait_until(lambda: not ready(client, "prefill"), 10, "news of the death")
        answer = client.generate(PROMPT, max_tokens=2, temperature=0.0, return_token_ids=True)
        assert list(answer.token_ids or ()) == greedy(tiny_model, PROMPT, 2)
        wait_until(lambda: num_worker_actors() == 1, 5, "end of its actor")
        # The launcher's own death ends the rest, without anyone asking it to.
        launcher = ray.get_actor(ray_cluster.actor_name(settings.ray), settings.ray.namespace)
        ray.kill(launcher)
    assert_nothing_left(pids)


class Moody:
    """An actor that does what launchers should not."""

    def fail(self) -> None:
        raise KeyError("disk full")

    def hang(self) -> None:
        signal.pause()

    def die(self) -> None:
        os._exit(1)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("fail", r"failed: .*KeyError\('disk full'\)"),
        ("hang", r"did not answer within 1 s"),
        ("die", "is dead"),
    ],
)
def test_errors_of_ray_reach_nobody(ray_cluster: ModuleType, way: str, message: str) -> None:
    actor: Any = ray.remote(Moody).options(num_cpus=0).remote()
    ray.get(actor.__ray_ready__.remote(), timeout=60)
    try:
        with pytest.raises(LaunchError, match=message) as failed:
            ray_cluster._answer(getattr(actor, way).remote(), 1.0 if way == "hang" else 60.0)
        assert "Traceback" not in str(failed.value)
    finally:
        ray.kill(actor)


def test_no_room_says_what_was_wanted_and_leaves_room(
    ray_cluster: ModuleType, tiny_model: Path
) -> None:
    # ray-project/ray#27287: a placement group that can never fit waited for ever.
    with pytest.raises(LaunchError) as refused:
        ray_cluster.up(settings_of(tiny_model, "big", prefill=3, decode=1, placement_timeout_s=1))
    text = str(refused.value)
    assert "3 x (1 CPU, 1 prefill) and 1 x (1 CPU)" in text
    assert "8 of 8 CPU" in text
    assert "2 of 2 prefill" in text
    assert_nothing_left([])


def test_worker_that_fails_to_start_fails_up_by_name(
    ray_cluster: ModuleType, tiny_model: Path
) -> None:
    settings = settings_of(tiny_model, "broken", prefill=0, decode=1, decode_max_model_len=10**9)
    with pytest.raises(LaunchError, match=r"(?s)decode-0.*exited with code 1.*max_model_len"):
        ray_cluster.up(settings)
    assert_nothing_left([])
