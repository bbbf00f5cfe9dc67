from __future__ import annotations

from splitserve.config import EngineConfig, WorkerConfig
from splitserve.launch.hosted import HostedWorker, describe_bundles


def test_a_model_that_is_not_on_the_node_is_an_exit_that_says_so() -> None:
    config = WorkerConfig("decode", EngineConfig("/no/such/model"), "tcp://127.0.0.1:1", "decode-4")
    exited = HostedWorker("127.0.0.1", "cpu").run(config)
    assert (exited.launch_id, exited.exit_code) == ("decode-4", 1)
    assert "/no/such/model" in exited.last_lines


def test_bundles_in_words() -> None:
    bundles = [{"CPU": 1.0}, {"CPU": 1.0}, {"CPU": 2.0, "GPU": 0.5}]
    labels = [{}, {}, {"role": "decode"}]
    assert describe_bundles(bundles, labels) == (
        "2 x (1 CPU) and 1 x (2 CPU, 0.5 GPU on a node with {'role': 'decode'})"
    )
